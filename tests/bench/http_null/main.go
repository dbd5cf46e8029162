// http_null is the HTTP side of router_comparison.py: OpenAI-style workers that compute nothing, and a load for them.
//
//	http_null worker -port-file F [-prefill] [-gap 1ms]
//	http_null load -url http://127.0.0.1:PORT -rate 200 -seconds 10 -tokens 4
package main

import (
	"fmt"
	"os"
)

func main() {
	run := map[string]func([]string) error{"worker": runWorker, "load": runLoad}
	if len(os.Args) < 2 || run[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: http_null worker|load ...")
		os.Exit(2)
	}
	if err := run[os.Args[1]](os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

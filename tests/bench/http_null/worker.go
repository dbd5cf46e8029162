package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"time"
)

// request holds what a null worker looks at, of /v1/completions and of the text form of /generate.
type request struct {
	MaxTokens int  `json:"max_tokens"`
	Stream    bool `json:"stream"`
	Sampling  struct {
		MaxNewTokens int `json:"max_new_tokens"`
	} `json:"sampling_params"`
}

const chunk = `data: {"id":"0","object":"text_completion","created":0,"model":"null","choices":[{"index":0,"text":" a","logprobs":null,"finish_reason":%s}]}` + "\n\n"

// answer is the whole of an answer that is not streamed; with what a connector for KV would say of the transfer.
const answer = `{"id":"0","object":"text_completion","created":0,"model":"null","choices":[{"index":0,"text":"%s","logprobs":null,"finish_reason":"length"}],` +
	`"usage":{"prompt_tokens":128,"completion_tokens":%d,"total_tokens":%d},` +
	`"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"0","remote_block_ids":[0,1],"remote_host":"127.0.0.1","remote_port":1}}`

// runWorker serves one worker that computes nothing. A prefill worker answers with one token whatever is asked for.
func runWorker(arguments []string) error {
	flags := flag.NewFlagSet("worker", flag.ExitOnError)
	portFile := flags.String("port-file", "", "where the port is written once it listens")
	prefill := flags.Bool("prefill", false, "answer with one token")
	gap := flags.Duration("gap", 0, "time between two streamed tokens")
	flags.Parse(arguments)

	complete := func(writer http.ResponseWriter, call *http.Request) {
		var asked request
		if err := json.NewDecoder(call.Body).Decode(&asked); err != nil {
			http.Error(writer, err.Error(), http.StatusBadRequest)
			return
		}
		tokens := max(asked.MaxTokens, asked.Sampling.MaxNewTokens, 1)
		if *prefill {
			tokens = 1
		}
		if !asked.Stream {
			writer.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(writer, answer, strings.Repeat(" a", tokens), tokens, 128+tokens)
			return
		}
		writer.Header().Set("Content-Type", "text/event-stream")
		flusher := writer.(http.Flusher)
		for i := 0; i < tokens; i++ {
			reason := "null"
			if i == tokens-1 {
				reason = `"length"`
			}
			fmt.Fprintf(writer, chunk, reason)
			flusher.Flush()
			if *gap > 0 && i < tokens-1 {
				time.Sleep(*gap)
			}
		}
		fmt.Fprint(writer, "data: [DONE]\n\n")
	}
	say := func(text string) http.HandlerFunc {
		return func(writer http.ResponseWriter, _ *http.Request) {
			writer.Header().Set("Content-Type", "application/json")
			fmt.Fprint(writer, text)
		}
	}
	routes := http.NewServeMux()
	for _, path := range []string{"/health", "/health_generate", "/ready"} {
		routes.HandleFunc(path, say("{}"))
	}
	for _, path := range []string{"/get_model_info", "/model_info", "/get_server_info", "/server_info"} {
		routes.HandleFunc(path, say(`{"model_path":"null","served_model_name":"null","model_id":"null","is_generation":true,"version":"0"}`))
	}
	routes.HandleFunc("/v1/models", say(`{"object":"list","data":[{"id":"null","object":"model","created":0,"owned_by":"vllm"}]}`))
	routes.HandleFunc("/version", say(`{"version":"0"}`))
	routes.HandleFunc("/v1/completions", complete)
	routes.HandleFunc("/generate", complete)

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	port := fmt.Sprint(listener.Addr().(*net.TCPAddr).Port)
	if err := os.WriteFile(*portFile+".new", []byte(port), 0o644); err != nil {
		return err
	}
	if err := os.Rename(*portFile+".new", *portFile); err != nil {
		return err
	}
	return http.Serve(listener, routes)
}

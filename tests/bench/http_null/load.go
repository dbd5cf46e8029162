package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"sort"
	"strings"
	"sync"
	"time"
)

// outcome of one streamed request.
type outcome struct {
	firstToken time.Duration
	tokens     int
	failure    string
}

// prompt is a text of so many words, each taken for a token, that shares no beginning with that of another number.
func prompt(number, words int) string {
	var text strings.Builder
	fmt.Fprintf(&text, "%d", number)
	for i := 1; i < words; i++ {
		text.WriteString(" a")
	}
	return text.String()
}

func ask(client *http.Client, url string, number, words, tokens int) (result outcome) {
	body, _ := json.Marshal(map[string]any{
		"model": "null", "prompt": prompt(number, words), "max_tokens": tokens, "stream": true, "ignore_eos": true})
	begin := time.Now()
	reply, err := client.Post(url+"/v1/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		return outcome{failure: err.Error()}
	}
	defer reply.Body.Close()
	if reply.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(reply.Body, 300))
		return outcome{failure: fmt.Sprint(reply.StatusCode, " ", string(text))}
	}
	lines := bufio.NewReader(reply.Body)
	for {
		line, err := lines.ReadSlice('\n')
		if bytes.HasPrefix(line, []byte("data: {")) {
			if result.tokens++; result.tokens == 1 {
				result.firstToken = time.Since(begin)
			}
		}
		if err != nil {
			if err != io.EOF {
				result.failure = err.Error()
			} else if result.tokens != tokens {
				result.failure = fmt.Sprintf("%d of %d tokens", result.tokens, tokens)
			}
			return result
		}
	}
}

// runLoad sends streamed completions, at a rate or all at once, and prints what came of them as JSON.
func runLoad(arguments []string) error {
	flags := flag.NewFlagSet("load", flag.ExitOnError)
	url := flags.String("url", "", "http://host:port")
	rate := flags.Int("rate", 0, "requests a second")
	seconds := flags.Int("seconds", 10, "for so long, with -rate")
	streams := flags.Int("streams", 0, "so many requests at once, without -rate")
	words := flags.Int("prompt", 128, "words a prompt")
	tokens := flags.Int("tokens", 4, "tokens an answer")
	flags.Parse(arguments)

	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 4096}, Timeout: 120 * time.Second}
	count := *streams
	if *rate > 0 {
		count = *rate * *seconds
	}
	outcomes := make([]outcome, count)
	var running sync.WaitGroup
	begin := time.Now()
	for i := range outcomes {
		if *rate > 0 {
			time.Sleep(time.Until(begin.Add(time.Duration(i) * time.Second / time.Duration(*rate))))
		}
		running.Add(1)
		go func() {
			defer running.Done()
			outcomes[i] = ask(client, *url, i, *words, *tokens)
		}()
	}
	running.Wait()
	took := time.Since(begin).Seconds()

	var first []float64
	received, sum, failures := 0, 0.0, map[string]int{}
	for _, one := range outcomes {
		received += one.tokens
		if one.failure != "" {
			failures[one.failure]++
			continue
		}
		first = append(first, float64(one.firstToken.Microseconds()))
		sum += first[len(first)-1]
	}
	sort.Float64s(first)
	at := func(share float64) float64 {
		if len(first) == 0 {
			return 0
		}
		return first[int(share*float64(len(first)-1))]
	}
	text, err := json.Marshal(map[string]any{
		"seconds": took, "requests": count, "ok": len(first), "failures": failures, "tokens": received,
		"tokens_per_s": float64(received) / took, "mean_ttft_us": sum / max(1, float64(len(first))),
		"p50_ttft_us": at(0.5), "p99_ttft_us": at(0.99)})
	fmt.Println(string(text))
	return err
}

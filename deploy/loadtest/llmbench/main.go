// llmbench measures what matters of streamed answers, the time to the first token, the times between tokens and goodput, with
// ghz's runner: its configuration files, its open and closed loops, its schedules.
//
// Usage: llmbench --config FILE [--ttft-slo 2s] [--itl-slo 100ms] [--json] HOST:PORT
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"sort"
	"sync"
	"time"

	"github.com/bojand/ghz/runner"
	"github.com/jhump/protoreflect/dynamic"
)

// One call, from the moment ghz starts it.
type call struct {
	begin  time.Time
	first  time.Time // its first message with tokens
	last   time.Time // its newest one
	gaps   []time.Duration
	tokens int
	ended  bool // the answer is whole
}

// Recv sees every message of a stream, in order, on the goroutine of its call. ghz does not tell of the end: the last message of
// a whole answer carries usage.
func (c *call) Recv(message *dynamic.Message, err error) error {
	if err != nil || message == nil {
		return err
	}
	c.note(tokensOf(message), isLast(message), time.Now())
	return nil
}

func (c *call) note(tokens int, last bool, now time.Time) {
	c.ended = c.ended || last
	if tokens == 0 {
		return
	}
	if c.tokens == 0 {
		c.first = now
	} else {
		// Tokens that come in one message came at one time: the wait is shared among them.
		gap := now.Sub(c.last) / time.Duration(tokens)
		for i := 0; i < tokens; i++ {
			c.gaps = append(c.gaps, gap)
		}
	}
	c.tokens += tokens
	c.last = now
}

// Send is for calls that stream requests; those of an answer do not.
func (c *call) Send(*runner.CallData) (*dynamic.Message, error) { return nil, io.EOF }

func tokensOf(message *dynamic.Message) int {
	ids, err := message.TryGetFieldByName("token_ids")
	if err != nil {
		return 0
	}
	list, _ := ids.([]interface{})
	return len(list)
}

func isLast(message *dynamic.Message) bool {
	field, err := message.TryGetFieldByName("finished")
	if err != nil {
		return false
	}
	finished, ok := field.(*dynamic.Message)
	return ok && finished != nil && finished.HasFieldName("usage")
}

type quantiles struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
}

// quantilesOf sorts its argument. Nearest rank.
func quantilesOf(seconds []float64) quantiles {
	if len(seconds) == 0 {
		return quantiles{}
	}
	sort.Float64s(seconds)
	at := func(q float64) float64 {
		return seconds[int(math.Max(0, math.Ceil(q*float64(len(seconds)))-1))]
	}
	sum := 0.0
	for _, s := range seconds {
		sum += s
	}
	return quantiles{sum / float64(len(seconds)), at(0.5), at(0.9), at(0.95), at(0.99), seconds[len(seconds)-1]}
}

// The figures beside ghz's own.
type figures struct {
	TTFT         quantiles `json:"ttft_s"`
	ITL          quantiles `json:"itl_s"`
	E2E          quantiles `json:"e2e_s"`
	Streams      int       `json:"streams"`
	Complete     int       `json:"complete"`
	Tokens       int       `json:"tokens"`
	TokensPerSec float64   `json:"tokens_per_second"`
	Good         int       `json:"good"`
	GoodputRatio float64   `json:"goodput_ratio"`
	Goodput      float64   `json:"goodput_per_second"`
	TTFTSLO      float64   `json:"ttft_slo_s"`
	ITLSLO       float64   `json:"itl_slo_s"`
}

// A good answer is whole, its first token came within the one target and the mean time between the others within the other.
func summarise(calls []*call, total time.Duration, ttftSLO, itlSLO time.Duration) figures {
	out := figures{Streams: len(calls), TTFTSLO: ttftSLO.Seconds(), ITLSLO: itlSLO.Seconds()}
	var ttft, itl, e2e []float64
	for _, c := range calls {
		out.Tokens += c.tokens
		if c.tokens == 0 {
			continue
		}
		wait := c.first.Sub(c.begin)
		ttft = append(ttft, wait.Seconds())
		var sum time.Duration
		for _, gap := range c.gaps {
			itl = append(itl, gap.Seconds())
			sum += gap
		}
		if !c.ended {
			continue
		}
		out.Complete++
		e2e = append(e2e, c.last.Sub(c.begin).Seconds())
		if wait <= ttftSLO && (len(c.gaps) == 0 || sum/time.Duration(len(c.gaps)) <= itlSLO) {
			out.Good++
		}
	}
	out.TTFT, out.ITL, out.E2E = quantilesOf(ttft), quantilesOf(itl), quantilesOf(e2e)
	if total > 0 {
		out.TokensPerSec = float64(out.Tokens) / total.Seconds()
		out.Goodput = float64(out.Good) / total.Seconds()
	}
	if len(calls) > 0 {
		out.GoodputRatio = float64(out.Good) / float64(len(calls))
	}
	return out
}

func run(config, host string) ([]*call, *runner.Report, error) {
	settings, err := load(config)
	if err != nil {
		return nil, nil, err
	}
	var mutex sync.Mutex
	var calls []*call
	report, err := runner.Run(settings.Call, host, runner.WithConfig(settings),
		runner.WithStreamInterceptorProviderFunc(func(*runner.CallData) runner.StreamInterceptor {
			c := &call{begin: time.Now()}
			mutex.Lock()
			defer mutex.Unlock()
			calls = append(calls, c)
			return c
		}))
	return calls, report, err
}

func load(path string) (*runner.Config, error) {
	settings := &runner.Config{}
	if err := runner.LoadConfig(path, settings); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if settings.Call == "" {
		return nil, fmt.Errorf("%s: names no call", path)
	}
	return settings, nil
}

// printJSON writes one object: ghz's report and the figures beside it, so that check_thresholds.py reads both.
func printJSON(out io.Writer, report *runner.Report, f figures) error {
	merged := map[string]interface{}{}
	report.Details = nil
	for _, part := range []interface{}{report, f} {
		text, err := json.Marshal(part)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(text, &merged); err != nil {
			return err
		}
	}
	text, err := json.MarshalIndent(merged, "", " ")
	if err == nil {
		_, err = fmt.Fprintln(out, string(text))
	}
	return err
}

func printTable(out io.Writer, report *runner.Report, f figures) {
	ms := func(s float64) string { return fmt.Sprintf("%9.1f", 1e3*s) }
	fmt.Fprintf(out, "%d calls in %.1f s: %v\n\n", report.Count, report.Total.Seconds(), report.StatusCodeDist)
	fmt.Fprintf(out, "ms           mean       p50       p90       p95       p99       max\n")
	for _, row := range []struct {
		name string
		q    quantiles
	}{{"TTFT", f.TTFT}, {"ITL", f.ITL}, {"answer", f.E2E}} {
		fmt.Fprintf(out, "%-8s%s %s %s %s %s %s\n", row.name, ms(row.q.Mean), ms(row.q.P50), ms(row.q.P90), ms(row.q.P95), ms(row.q.P99), ms(row.q.Max))
	}
	fmt.Fprintf(out, "\n%d tokens, %.1f a second\n", f.Tokens, f.TokensPerSec)
	fmt.Fprintf(out, "goodput: %d of %d answers (%.1f %%), %.2f a second, with TTFT <= %gs and mean ITL <= %gs\n", f.Good, f.Streams, 100*f.GoodputRatio, f.Goodput, f.TTFTSLO, f.ITLSLO)
}

func main() {
	config := flag.String("config", "", "ghz configuration, JSON or TOML, that calls a streaming method")
	ttftSLO := flag.Duration("ttft-slo", 2*time.Second, "a good answer's first token comes within this time")
	itlSLO := flag.Duration("itl-slo", 100*time.Millisecond, "and its further tokens this far apart, in the mean")
	asJSON := flag.Bool("json", false, "print one JSON object")
	flag.Parse()
	if *config == "" || flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: llmbench --config FILE [flags] HOST:PORT")
		flag.PrintDefaults()
		os.Exit(2)
	}
	calls, report, err := run(*config, flag.Arg(0))
	if err != nil {
		fmt.Fprintln(os.Stderr, "llmbench:", err)
		os.Exit(1)
	}
	f := summarise(calls, report.Total, *ttftSLO, *itlSLO)
	if *asJSON {
		err = printJSON(os.Stdout, report, f)
	} else {
		printTable(os.Stdout, report, f)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "llmbench:", err)
		os.Exit(1)
	}
}

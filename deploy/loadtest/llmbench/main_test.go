package main

import (
	"io"
	"testing"
	"time"
)

func at(begin time.Time, ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }

func answer(begin time.Time, firstMS int, gapsMS []int, ended bool) *call {
	c := &call{begin: begin, first: at(begin, firstMS), tokens: 1 + len(gapsMS), ended: ended}
	c.last = c.first
	for _, gap := range gapsMS {
		c.gaps = append(c.gaps, time.Duration(gap)*time.Millisecond)
		c.last = c.last.Add(time.Duration(gap) * time.Millisecond)
	}
	return c
}

func TestGoodAnswersAreWholeAndInTime(t *testing.T) {
	begin := time.Unix(0, 0)
	calls := []*call{
		answer(begin, 100, []int{10, 10}, true),
		answer(begin, 300, []int{10}, true),     // its first token came late
		answer(begin, 100, []int{10, 90}, true), // the others too far apart
		answer(begin, 100, []int{10}, false),    // cut
		{begin: begin},                          // refused
		answer(begin, 100, nil, true),           // one token has no gap
	}
	f := summarise(calls, 2*time.Second, 200*time.Millisecond, 40*time.Millisecond)
	if f.Good != 2 || f.Complete != 4 || f.Streams != 6 || f.Tokens != 11 {
		t.Fatalf("%+v", f)
	}
	if f.Goodput != 1 || f.TokensPerSec != 5.5 || f.TTFT.Max != 0.3 || f.TTFT.P50 != 0.1 || f.ITL.Max != 0.09 || f.E2E.Max != 0.31 {
		t.Fatalf("%+v", f)
	}
}

func TestNothingMeasuredIsZeroAndNotNaN(t *testing.T) {
	if f := summarise(nil, 0, time.Second, time.Second); f.GoodputRatio != 0 || f.TTFT.Mean != 0 {
		t.Fatalf("%+v", f)
	}
}

func TestQuantilesAreOfTheNearestRank(t *testing.T) {
	seconds := []float64{}
	for i := 100; i >= 1; i-- {
		seconds = append(seconds, float64(i))
	}
	if q := quantilesOf(seconds); q.P50 != 50 || q.P95 != 95 || q.P99 != 99 || q.Max != 100 || q.Mean != 50.5 {
		t.Fatalf("%+v", q)
	}
}

func TestTokensOfOneMessageShareTheWaitForIt(t *testing.T) {
	begin := time.Unix(0, 0)
	c := &call{begin: begin}
	c.note(0, false, at(begin, 5)) // no tokens yet
	c.note(1, false, at(begin, 10))
	c.note(3, false, at(begin, 40))
	c.note(0, true, at(begin, 50))
	if c.tokens != 4 || !c.ended || c.first != at(begin, 10) || c.last != at(begin, 40) || len(c.gaps) != 3 || c.gaps[0] != 10*time.Millisecond {
		t.Fatalf("%+v", c)
	}
}

func TestErrorsGoOnToTheRunner(t *testing.T) {
	c := &call{}
	if err := c.Recv(nil, io.ErrUnexpectedEOF); err != io.ErrUnexpectedEOF || c.ended {
		t.Fatal(err)
	}
}

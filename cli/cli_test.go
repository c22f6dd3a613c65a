package cli

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
)

func TestParseSize(t *testing.T) {
	for in, want := range map[string]int{"1": 1, "4096": 4096, "4K": 4 << 10, "16k": 16 << 10, "1M": 1 << 20, "2G": 2 << 30} {
		got, err := parseSize(in)
		if err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", in, got, err, want)
		}
		if again, err := parseSize(formatSize(want)); err != nil || again != want {
			t.Errorf("%d is written %q, which reads as %d, %v", want, formatSize(want), again, err)
		}
	}
	for _, in := range []string{"", "K", "0", "-1", "1.5M", "4KB", "99999999G", "x"} {
		if got, err := parseSize(in); !errors.Is(err, errUsage) {
			t.Errorf("%q: %d, %v; want an error of usage", in, got, err)
		}
	}
}

func TestBadArguments(t *testing.T) {
	for _, args := range [][]string{
		{"bench", "--block", "7"}, {"bench", "--transport", "pigeon"}, {"bench", "more"}, {"bench", "--rounds", "1"}, {"bench", "--transfers", "0"}, {"bench", "--transfers", "33", "--block", "1M"}, {"bench", "--memory", "far"}, {"bench", "--encrypt", "--transport", "local"},
		{"bench", "--nope"}, {"demo", "--nope"}, {"demo", "--transport", "pigeon"},
	} {
		run := runBench
		if args[0] == "demo" {
			run = runDemo
		}
		if err := run(context.Background(), args[1:], &bytes.Buffer{}); !errors.Is(err, errUsage) {
			t.Errorf("%v: %v, want an error of usage", args, err)
		}
	}
	if err := runProxy(context.Background(), []string{"--prefill", "http://h:1"}, &bytes.Buffer{}); !errors.Is(err, errUsage) || !strings.Contains(err.Error(), "--decode") {
		t.Errorf("proxy without a decode server: %v", err)
	}
}

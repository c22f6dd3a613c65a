package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
)

// join gives one JSON of files in a folder, by their names. A file that is no JSON, since its program was cut off, becomes a string; one
// that is empty or missing becomes null. It also lists what the files say was not run.
func join(folder string, names []string, commit io.Reader) (whole []byte, missed []string, err error) {
	text, err := io.ReadAll(commit)
	if err != nil {
		return nil, nil, err
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "{\n\"kvconn\": %s", quoted(bytes.TrimSpace(text)))
	for _, name := range names {
		part, err := os.ReadFile(filepath.Join(folder, name))
		switch {
		case err != nil || len(part) == 0:
			part = []byte("null")
		case !json.Valid(part):
			part = quoted(part)
		}
		missed = append(missed, missedIn(part)...)
		fmt.Fprintf(&out, ",\n%s:\n%s", quoted([]byte(name)), bytes.TrimSpace(part))
	}
	out.WriteString("\n}\n")
	return out.Bytes(), missed, nil
}

// missedIn lists what a part of the kit did not run, and why: the whole part, some of its cases, or runs of the transport suite; and the
// questions that it did not ask.
func missedIn(part []byte) (list []string) {
	var all struct {
		NotRun string `json:"not_run"`
	}
	var some struct {
		NotRun   map[string]string `json:"not_run"`
		NotAsked map[string]string `json:"not_asked"`
		Runs     []result          `json:"runs"`
	}
	if json.Unmarshal(part, &all) == nil && all.NotRun != "" { // that of steps.py alone
		return []string{"NOT RUN: a decode step beside loads: " + all.NotRun}
	}
	if json.Unmarshal(part, &some) != nil {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(some.NotRun)) {
		list = append(list, "NOT RUN: "+name+": "+some.NotRun[name])
	}
	for _, question := range slices.Sorted(maps.Keys(some.NotAsked)) {
		list = append(list, "NOT ASKED: "+question+": "+some.NotAsked[question])
	}
	for _, r := range some.Runs {
		if r.Verdict == verdictNotRun {
			list = append(list, fmt.Sprintf("NOT RUN: %s, %s: %s", r.Transport, r.Memory, r.Reason))
		}
	}
	return list
}

func quoted(text []byte) []byte {
	out, err := json.Marshal(string(text))
	if err != nil {
		panic(err) // a string always is JSON
	}
	return out
}

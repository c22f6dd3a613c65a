package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// join gives one JSON of files in a folder, by their names. A file that is no JSON, since its program was cut off, becomes a string; one
// that is empty or missing becomes null.
func join(folder string, names []string, commit io.Reader) ([]byte, error) {
	text, err := io.ReadAll(commit)
	if err != nil {
		return nil, err
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
		fmt.Fprintf(&out, ",\n%s:\n%s", quoted([]byte(name)), bytes.TrimSpace(part))
	}
	out.WriteString("\n}\n")
	return out.Bytes(), nil
}

func quoted(text []byte) []byte {
	out, err := json.Marshal(string(text))
	if err != nil {
		panic(err) // a string always is JSON
	}
	return out
}

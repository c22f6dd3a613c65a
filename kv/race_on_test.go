//go:build race

package kv

// raced: see race_off_test.go.
const raced = true

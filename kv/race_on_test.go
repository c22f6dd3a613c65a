//go:build race

package kv

const raced = true

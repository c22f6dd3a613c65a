//go:build race

package attack

const raced = true

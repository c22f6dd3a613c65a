//go:build !race

package core

const Raced = false

package testdouble

import (
	"os"
	"testing"
)

func TestLibrary(t *testing.T) {
	for _, kind := range []Kind{Newest, CUDA12, Old} {
		if _, err := os.Stat(Library(t, kind)); err != nil {
			t.Error(err)
		}
	}
}

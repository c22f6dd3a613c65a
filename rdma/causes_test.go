package rdma

import (
	"errors"
	"io"
	"io/fs"
	"testing"
)

func TestCauses(t *testing.T) {
	if err := allOf(nil, nil); err != nil {
		t.Errorf("of nothing: %v", err)
	}
	err := allOf(io.EOF, nil, allOf(fs.ErrExist, fs.ErrClosed))
	if got, want := err.Error(), "EOF; file already exists; file already closed"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for _, cause := range []error{io.EOF, fs.ErrExist, fs.ErrClosed} {
		if !errors.Is(err, cause) {
			t.Errorf("%v is not kept", cause)
		}
	}
}

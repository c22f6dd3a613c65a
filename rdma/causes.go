package rdma

import (
	"slices"
	"strings"
)

// causes are several errors in one line, as reasons and logs have them.
type causes []error

// allOf is errors.Join in one line: nil without an error.
func allOf(list ...error) error {
	list = slices.DeleteFunc(slices.Clone(list), func(err error) bool { return err == nil })
	if len(list) == 0 {
		return nil
	}
	return causes(list)
}

func (c causes) Error() string {
	texts := make([]string, len(c))
	for i, err := range c {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

func (c causes) Unwrap() []error { return c }

package rdma

import (
	"slices"
	"strings"
)

// manyCauses are several errors in one line, as reasons and logs have them.
type manyCauses []error

// allOf joins errors as errors.Join does, but in one line: nil if there is none.
func allOf(list ...error) error {
	list = slices.DeleteFunc(slices.Clone(list), func(err error) bool { return err == nil })
	if len(list) == 0 {
		return nil
	}
	return manyCauses(list)
}

func (c manyCauses) Error() string {
	texts := make([]string, len(c))
	for i, err := range c {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

func (c manyCauses) Unwrap() []error { return c }

package core

import (
	"reflect"
	"testing"
)

// TestOptionsDefaults: Options that set nothing are the Defaults.
func TestOptionsDefaults(t *testing.T) {
	if got := (Options{}).WithDefaults(); !reflect.DeepEqual(got, Defaults) {
		t.Errorf("Options that set nothing are %+v, want %+v", got, Defaults)
	}
}

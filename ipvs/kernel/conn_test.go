package kernel

import (
	"errors"
	"io"
	"testing"
)

func TestWhole(t *testing.T) {
	calls := 0
	fails := func(n int, with, then error) func() error {
		calls = 0
		return func() error {
			if calls++; calls <= n {
				return with
			}
			return then
		}
	}
	if err := whole(fails(3, errInterrupted, nil)); err != nil || calls != 4 {
		t.Errorf("interrupted three times: %v after %d calls", err, calls)
	}
	if err := whole(fails(3, errInterrupted, io.EOF)); err != io.EOF || calls != 4 {
		t.Errorf("another error: %v after %d calls", err, calls)
	}
	if err := whole(fails(1000, errInterrupted, nil)); !errors.Is(err, errInterrupted) || calls > 100 {
		t.Errorf("interrupted each time: %v after %d calls", err, calls)
	}
}

// TestAttributesCutShort reads what no kernel sends.
func TestAttributesCutShort(t *testing.T) {
	good := attribute32(nil, 1, 5)
	for _, b := range [][]byte{nil, {8}, {8, 0, 2, 0}, {0, 0, 2, 0}, {3, 0, 2, 0}, {5, 0, 2, 0}} {
		n := 0
		for kind, value := range attributes(append(append([]byte(nil), good...), b...)) {
			if n++; kind != 1 || number(value) != 5 {
				t.Errorf("%v: attribute %d is %v", b, kind, value)
			}
		}
		if n != 1 {
			t.Errorf("%v: %d attributes, want 1", b, n)
		}
		if _, _, err := parseService(append(genl(0), b...)); err == nil {
			t.Errorf("%v is a virtual server", b)
		}
		if _, _, err := parseDestination(append(genl(0), b...), 4); err == nil {
			t.Errorf("%v is a destination", b)
		}
	}
}

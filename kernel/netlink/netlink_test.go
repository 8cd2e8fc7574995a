package netlink

import (
	"errors"
	"io"
	"testing"
)

func TestRetry(t *testing.T) {
	t.Parallel()
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
	if err := Retry(fails(3, ErrInterrupted, nil)); err != nil || calls != 4 {
		t.Errorf("interrupted three times: %v after %d calls", err, calls)
	}
	if err := Retry(fails(3, ErrInterrupted, io.EOF)); err != io.EOF || calls != 4 {
		t.Errorf("another error: %v after %d calls", err, calls)
	}
	if err := Retry(fails(1000, ErrInterrupted, nil)); !errors.Is(err, ErrInterrupted) || calls > 100 {
		t.Errorf("interrupted each time: %v after %d calls", err, calls)
	}
}

// TestAttributesCutShort reads what no kernel sends.
func TestAttributesCutShort(t *testing.T) {
	t.Parallel()
	good := Buffer(nil).Uint32(1, 5)
	if !Whole(good) || !Whole(nil) {
		t.Error("an attribute that is whole is not taken for one")
	}
	for _, b := range [][]byte{nil, {8}, {8, 0, 2, 0}, {0, 0, 2, 0}, {3, 0, 2, 0}, {5, 0, 2, 0}} {
		n := 0
		all := append(append([]byte(nil), good...), b...)
		for kind, value := range Attributes(all) {
			if n++; kind != 1 || Number(value) != 5 {
				t.Errorf("%v: attribute %d is %v", b, kind, value)
			}
		}
		if n != 1 || Whole(all) != (b == nil) {
			t.Errorf("%v: %d attributes, want 1; whole: %t", b, n, Whole(all))
		}
	}
}

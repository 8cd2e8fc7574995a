package host

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestUsable(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		flags int
		want  bool
	}{
		{0, true},
		{unix.IFA_F_PERMANENT, true},
		{unix.IFA_F_TENTATIVE, false},
		{unix.IFA_F_TENTATIVE | unix.IFA_F_OPTIMISTIC, true},
		{unix.IFA_F_DADFAILED, false},
	} {
		if got := usable(tc.flags); got != tc.want {
			t.Errorf("flags %#x: %t, want %t", tc.flags, got, tc.want)
		}
	}
}

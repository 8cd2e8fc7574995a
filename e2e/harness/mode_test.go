package harness

import (
	"testing"

	"nodeproxy/config"
)

// TestModeUnderTest: tests can run in each mode that a configuration may have, and in mode iptables unless told otherwise.
func TestModeUnderTest(t *testing.T) {
	for _, name := range config.Modes() {
		t.Setenv(ModeVariable, name)
		if got := ModeUnderTest(); got != Mode(name) {
			t.Errorf("mode %s, want %s", got, name)
		}
	}
	t.Setenv(ModeVariable, "")
	if got := ModeUnderTest(); got != IPTables {
		t.Errorf("mode %s where none is asked for, want %s", got, IPTables)
	}
	for _, m := range []Mode{IPTables, IPVS, NFTables} {
		t.Setenv(ModeVariable, string(m))
		ModeUnderTest() // It panics for a mode that there is not.
	}
}

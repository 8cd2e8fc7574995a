package health

import (
	"os"
	"testing"

	"nodeproxy/internal/nstest"
)

// TestMain: tests listen on loopback addresses of both families, whatever settings the machine has.
func TestMain(m *testing.M) {
	nstest.Isolate()
	os.Exit(m.Run())
}

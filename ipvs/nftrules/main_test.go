package nftrules

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/kernel/inkernel"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/names"
)

func TestMain(m *testing.M) { os.Exit(inkernel.Main(m)) }

func openDevice(t testing.TB) *host.Device {
	t.Helper()
	d, err := host.OpenDevice(names.Device)
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

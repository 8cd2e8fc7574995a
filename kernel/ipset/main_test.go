package ipset

import (
	"os"
	"testing"

	"nodeproxy/e2e/kernel/inkernel"
)

func TestMain(m *testing.M) { os.Exit(inkernel.Main(m)) }

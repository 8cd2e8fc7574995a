// Package module loads modules of the kernel.
package module

import (
	"bytes"
	"fmt"
	"os/exec"
)

// Load loads a kernel module. Where it is built in, that is no error.
func Load(name string) error {
	out, err := exec.Command("modprobe", name).CombinedOutput()
	if err == nil {
		return nil
	}
	if line, _, _ := bytes.Cut(bytes.TrimSpace(out), []byte("\n")); len(line) > 0 {
		return fmt.Errorf("%s", line)
	}
	return err
}

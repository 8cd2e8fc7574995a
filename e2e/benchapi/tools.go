package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"nodeproxy/e2e/harness"
)

// linkTools makes a directory in which the plain names, such as iptables, stand for a variant's tools: kube-proxy calls
// them by these.
func linkTools(v harness.Variant, dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, part := range []string{"", "-save", "-restore"} {
			if err := linkTool(v.Tool(family)+part, filepath.Join(dir, family+part)); err != nil {
				return fmt.Errorf("the %s variant of iptables: %w", v, err)
			}
		}
	}
	return nil
}

// linkTool makes a link to a tool. The tools are one program, which goes by the name that it is called by.
func linkTool(tool, link string) error {
	target, err := exec.LookPath(tool)
	if err != nil {
		return err
	}
	if target, err = filepath.EvalSymlinks(target); err != nil {
		return err
	}
	return os.Symlink(target, link)
}

package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// configOf runs "nodeproxy config" and returns what it writes.
func configOf(args ...string) (stdout, stderr string, err error) {
	var out, errs bytes.Buffer
	cmd := configCommand()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	cmd.SetArgs(args)
	err = cmd.Execute()
	return out.String(), errs.String(), err
}

// TestConfigCommand prints a file on one stream and what there is to say about it on the other.
func TestConfigCommand(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "in.yaml")
	const in = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clusterCIDR: 10.0.0.0/8
portRange: 1-2
`
	if err := os.WriteFile(path, []byte(in), 0o644); err != nil {
		t.Fatal(err)
	}
	out, errs, err := configOf("--config="+path, "--cluster-cidr=11.0.0.0/8")
	if err != nil {
		t.Fatal(err)
	}
	line := "clusterCIDR: 11.0.0.0/8 # --cluster-cidr overrides " + path + ":3, which has 10.0.0.0/8\n"
	if !strings.Contains(out, line) {
		t.Errorf("there is no line %q in\n%s", line, out)
	}
	want := "problem: " + path + ":3: clusterCIDR: 10.0.0.0/8 here, 11.0.0.0/8 by --cluster-cidr; the flag overrides the file\n" +
		"problem: " + path + ":4: portRange: no effect: no ports are reserved; kube-proxy has no use for it either; it is ignored\n"
	if errs != want {
		t.Errorf("said\n%swant\n%s", errs, want)
	}
}

// TestWriteConfigTo writes the same to a file, and prints nothing.
func TestWriteConfigTo(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "out.yaml")
	printed, _, err := configOf("--v=5")
	if err != nil {
		t.Fatal(err)
	}
	out, errs, err := configOf("--v=5", "--write-config-to="+path)
	if err != nil || out+errs != "" {
		t.Fatalf("%v; printed %s%s", err, out, errs)
	}
	written, err := os.ReadFile(path)
	if err != nil || string(written) != printed {
		t.Errorf("%v; written\n%swant\n%s", err, written, printed)
	}
	if _, _, err := configOf("--write-config-to=/nowhere/x"); err == nil || !strings.HasPrefix(err.Error(), "--write-config-to: ") {
		t.Errorf("a file that can't be written: %v", err)
	}
}

// TestConfigMistakes are usage errors: exit code 2.
func TestConfigMistakes(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"--config=/nowhere/x"}, {"--proxy-mode=ebpf"}, {"--iptables-masquerade-bit=32"},
		{"--write-config-to=/nowhere/x", "--oom-score-adj=2000"},
	} {
		_, _, err := configOf(args...)
		if usage := new(usageError); !errors.As(err, &usage) {
			t.Errorf("%q: %v", args, err)
		}
	}
}

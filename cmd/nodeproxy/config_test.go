package main

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestConfigCommand prints a file on one stream and what there is to say about it on the other.
func TestConfigCommand(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "in.yaml")
	const in = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clusterCIDR: 10.0.0.0/8
portRange: 1-2
`
	writeFile(t, path, in)
	out, errs, err := inProcess("", "config", "--config="+path, "--cluster-cidr=11.0.0.0/8")
	require.NoError(t, err)
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
	printed, _, err := inProcess("", "config", "--v=5")
	require.NoError(t, err)
	out, errs, err := inProcess("", "config", "--v=5", "--write-config-to="+path)
	if err != nil || out+errs != "" {
		t.Fatalf("%v; printed %s%s", err, out, errs)
	}
	if written := readFile(t, path); written != printed {
		t.Errorf("written\n%swant\n%s", written, printed)
	}
	if _, _, err := inProcess("", "config", "--write-config-to=/nowhere/x"); err == nil || !strings.HasPrefix(err.Error(), "--write-config-to: ") {
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
		_, _, err := inProcess("", append([]string{"config"}, args...)...)
		if usage := new(usageError); !errors.As(err, &usage) {
			t.Errorf("%q: %v", args, err)
		}
	}
}

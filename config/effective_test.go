package config

import (
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden files anew")

// TestEffectiveGolden: what is printed of defaults, files and flags.
func TestEffectiveGolden(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ golden, args string }{
		{"defaults.golden", ""},
		{"kubeadm.golden", "--config=testdata/kubeadm.yaml --hostname-override=node1"},
		{"overridden.golden", "--config=testdata/unusual.yaml --hostname-override=node1 --iptables-masquerade-bit=3 " +
			"--nodeport-addresses=primary --feature-gates=WinOverlay=true --metrics-bind-address= --iptables-backend=nft " +
			"--master=https://m --ipvs-scheduler=rr --conntrack-min=1 --v=6 --take-over"},
	} {
		e := must(flagsOf(t, strings.Fields(tc.args)...).Effective())(t)
		got := must(e.YAML())(t)
		path := filepath.Join("testdata", tc.golden)
		if *update {
			require.NoError(t, os.WriteFile(path, got, 0o644))
		}
		want := must(os.ReadFile(path))(t)
		if string(got) != string(want) {
			t.Errorf("%s (go test ./config -update writes it anew): got\n%s", tc.golden, got)
		}
	}
}

// TestEffectiveIsAFile: what is printed is read as a file with the same meaning.
func TestEffectiveIsAFile(t *testing.T) {
	t.Parallel()
	for _, args := range []string{"", "--config=testdata/unusual.yaml", "--config=testdata/kubeadm.yaml --v=5",
		"--config=testdata/unusual.yaml --nodeport-addresses=primary --log-flush-frequency=3s"} {
		first := must(flagsOf(t, append(strings.Fields(args), "--manifests=m")...).Effective())(t)
		text := must(first.YAML())(t)
		path := filepath.Join(t.TempDir(), "config.yaml")
		require.NoError(t, os.WriteFile(path, text, 0o644))
		a := must(first.Config())(t)
		b := must(flagsOf(t, "--config="+path, "--manifests=m").Config())(t)
		a.Findings, b.Findings, a.Configz, b.Configz = nil, nil, nil, nil
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: got\n%+v\nwant\n%+v", args, b, a)
		}
	}
}

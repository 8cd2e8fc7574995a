package config

import (
	"strings"
	"testing"
)

func TestServiceMetrics(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		want int
		err  string
	}{
		{[]string{"--mode=iptables"}, 0, ""},
		{[]string{"--mode=ipvs"}, 1000, ""},
		{[]string{"--mode=nftables"}, 1000, ""},
		{[]string{"--mode=iptables", "--service-metrics=20"}, 20, ""},
		{[]string{"--mode=ipvs", "--service-metrics=0"}, 0, ""},
		{[]string{"--mode=ipvs", "--service-metrics=-2"}, 0, "--service-metrics: -2 is less than -1"},
	} {
		cfg, err := parse(t, c.args...)
		switch {
		case c.err != "":
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v: error %v, want %s", c.args, err, c.err)
			}
		case err != nil || cfg.ServiceMetrics != c.want:
			t.Errorf("%v: %+v, %v; want %d", c.args, cfg, err, c.want)
		}
	}
}

func TestResetTCP(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		want bool
	}{{nil, false}, {[]string{"--reset-tcp"}, true}, {[]string{"--reset-tcp=false"}, false}} {
		if cfg, err := parse(t, c.args...); err != nil || cfg.Settings.ResetTCP != c.want {
			t.Errorf("%v: %v; want %t", c.args, err, c.want)
		}
	}
}

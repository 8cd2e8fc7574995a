package config

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"
)

// A mode is what this package has to know about a proxy mode.
type mode struct {
	name string
	// gate is kube-proxy's feature gate that switches the mode off; "" if there is none.
	gate string
	// serviceMetrics is the default of --service-metrics.
	serviceMetrics int
	// complete takes over settings from the mode's own section of the file, and resets those that the mode can't honour.
	complete func(*Config, *proxyconfig.KubeProxyConfiguration)
}

const modeNFTables = "nftables"

var modes = []mode{
	{name: "iptables", complete: func(*Config, *proxyconfig.KubeProxyConfiguration) {}},
	{name: "ipvs", gate: "KubeProxyIPVS", serviceMetrics: 1000, complete: func(c *Config, kp *proxyconfig.KubeProxyConfiguration) {
		c.SyncPeriod, c.MinSyncPeriod = kp.IPVS.SyncPeriod.Duration, kp.IPVS.MinSyncPeriod.Duration
		c.Settings.LocalhostNodePorts = false // IPVS drops what leaves the node with a loopback address.
	}},
	{name: modeNFTables, serviceMetrics: 1000, complete: func(c *Config, kp *proxyconfig.KubeProxyConfiguration) {
		c.SyncPeriod, c.MinSyncPeriod = kp.NFTables.SyncPeriod.Duration, kp.NFTables.MinSyncPeriod.Duration
		c.MasqueradeBit, c.Settings.MasqueradeAll = int(*kp.NFTables.MasqueradeBit), kp.NFTables.MasqueradeAll
		c.Settings.LocalhostNodePorts = false // as in kube-proxy's mode of this name
		if at := &c.Settings.NodePortAddresses; len(at.CIDRs) == 0 {
			at.Primary = true // as in kube-proxy's mode of this name
		}
	}},
}

// defaultMode is used where the configuration names no mode.
var defaultMode = modes[0].name

// Modes are the names of the modes that a Config may have.
func Modes() []string {
	var out []string
	for _, m := range modes {
		out = append(out, m.name)
	}
	return out
}

// modeNamed returns the entry of a mode, or if the mode is unknown, one without any effect.
func modeNamed(name string) (m mode, known bool) {
	if i := slices.IndexFunc(modes, func(m mode) bool { return m.name == name }); i >= 0 {
		return modes[i], true
	}
	return mode{name: name, complete: func(*Config, *proxyconfig.KubeProxyConfiguration) {}}, false
}

// mode validates the mode and how nodeproxy runs. It returns the mode's entry, without any effect if the mode is unknown.
func (k *checker) mode(c *Config) mode {
	if c.SysctlDir = k.own.sysctlDir; !filepath.IsAbs(c.SysctlDir) {
		k.check("--sysctl-dir", fmt.Errorf("%q is not an absolute path", c.SysctlDir))
	}
	if c.Socket = k.own.socket; c.Socket != "" && !filepath.IsAbs(c.Socket) {
		k.check("--socket", fmt.Errorf("%q is not an absolute path", c.Socket))
	}
	c.Mode = string(k.kp.Mode)
	m, known := modeNamed(c.Mode)
	if !known {
		all := Modes()
		k.check("mode", fmt.Errorf("%q is not supported; %s and %s are", c.Mode, strings.Join(all[:len(all)-1], ", "), all[len(all)-1]))
	}
	if m.gate != "" && !k.gateOn(m.gate) {
		k.check("mode", fmt.Errorf("%s is switched off by %s", m.name, k.saying("featureGates", m.gate+"=false")))
	}
	if c.ServiceMetrics = int(k.own.serviceMetrics); c.ServiceMetrics < -1 {
		k.check("--service-metrics", fmt.Errorf("%d is less than -1", c.ServiceMetrics))
	} else if c.ServiceMetrics == -1 {
		c.ServiceMetrics = m.serviceMetrics
	}
	c.Cleanup, c.InitOnly, c.TakeOver = k.own.cleanup, k.own.initOnly, k.own.takeOver
	if c.Cleanup && c.InitOnly {
		k.check("--cleanup", errors.New("can't be combined with --init-only"))
	}
	return m
}

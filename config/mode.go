package config

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

const modeIPTables, modeIPVS, modeNFTables = "iptables", "ipvs", "nftables"

// defaultMode is used where the configuration names no mode.
const defaultMode = modeIPTables

// Modes are the names of the modes that a Config may have.
func Modes() []string { return []string{modeIPTables, modeIPVS, modeNFTables} }

// ipvsGate is kube-proxy's feature gate that switches mode ipvs off.
const ipvsGate = "KubeProxyIPVS"

// mode validates the mode and how nodeproxy runs.
func (k *checker) mode(c *Config) {
	if c.SysctlDir = k.own.sysctlDir; !filepath.IsAbs(c.SysctlDir) {
		k.check("--sysctl-dir", fmt.Errorf("%q is not an absolute path", c.SysctlDir))
	}
	if c.Socket = k.own.socket; c.Socket != "" && !filepath.IsAbs(c.Socket) {
		k.check("--socket", fmt.Errorf("%q is not an absolute path", c.Socket))
	}
	if c.Mode = string(k.kp.Mode); !slices.Contains(Modes(), c.Mode) {
		all := Modes()
		k.check("mode", fmt.Errorf("%q is not supported; %s and %s are", c.Mode, strings.Join(all[:len(all)-1], ", "), all[len(all)-1]))
	}
	if c.Mode == modeIPVS && !k.gateOn(ipvsGate) {
		k.check("mode", fmt.Errorf("%s is switched off by %s", c.Mode, k.saying("featureGates", ipvsGate+"=false")))
	}
	switch c.ServiceMetrics = int(k.own.serviceMetrics); {
	case c.ServiceMetrics < -1:
		k.check("--service-metrics", fmt.Errorf("%d is less than -1", c.ServiceMetrics))
	case c.ServiceMetrics == -1 && c.Mode == modeIPTables:
		c.ServiceMetrics = 0
	case c.ServiceMetrics == -1:
		c.ServiceMetrics = 1000
	}
	c.Cleanup, c.InitOnly, c.TakeOver = k.own.cleanup, k.own.initOnly, k.own.takeOver
	if c.HandOver = k.own.handOverTo == modeNFTables; !c.HandOver && k.own.handOverTo != "" {
		k.check("--hand-over-to", fmt.Errorf("%q is not supported; only a kube-proxy in mode %s needs it", k.own.handOverTo, modeNFTables))
	}
	if c.Cleanup && c.InitOnly {
		k.check("--cleanup", errors.New("can't be combined with --init-only"))
	}
}

// ofMode takes over settings from the mode's own section of the file, and resets those that the mode can't honour.
func (k *checker) ofMode(c *Config) {
	switch kp := &k.kp; c.Mode {
	case modeIPVS:
		c.SyncPeriod, c.MinSyncPeriod = kp.IPVS.SyncPeriod.Duration, kp.IPVS.MinSyncPeriod.Duration
		c.Settings.LocalhostNodePorts = false // IPVS drops what leaves the node with a loopback address.
	case modeNFTables:
		c.SyncPeriod, c.MinSyncPeriod = kp.NFTables.SyncPeriod.Duration, kp.NFTables.MinSyncPeriod.Duration
		c.MasqueradeBit, c.Settings.MasqueradeAll = int(*kp.NFTables.MasqueradeBit), kp.NFTables.MasqueradeAll
		c.Settings.LocalhostNodePorts = false // as in kube-proxy's mode of this name
		if at := &c.Settings.NodePortAddresses; len(at.CIDRs) == 0 {
			at.Primary = true // as in kube-proxy's mode of this name
		}
	}
}

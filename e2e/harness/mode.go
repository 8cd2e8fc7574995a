package harness

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"nodeproxy/config"
)

// Mode is a mode of nodeproxy: one of config.Modes.
type Mode string

// The modes that tests tell apart.
const (
	IPTables Mode = "iptables"
	IPVS     Mode = "ipvs"
	NFTables Mode = "nftables"
)

// ModeVariable is the environment variable with the mode in which daemons run; IPTables if it is not set.
const ModeVariable = "NODEPROXY_E2E_MODE"

// ModeUnderTest is the mode that ModeVariable asks for.
func ModeUnderTest() Mode {
	name := os.Getenv(ModeVariable)
	if name == "" {
		return IPTables
	}
	if all := config.Modes(); !slices.Contains(all, name) {
		panic(fmt.Sprintf("%s=%s: there is no such mode, but %s", ModeVariable, name, strings.Join(all, ", ")))
	}
	return Mode(name)
}

// VIPs is how mode ipvs makes the addresses of Services the node's own: a value of --ipvs-vips.
type VIPs string

// The values of --ipvs-vips.
const (
	VIPRoutes    VIPs = "routes"
	VIPAddresses VIPs = "addresses"
)

// VIPsWith is what World.Run uses with a variant of iptables, so that tests on both variants try both.
func VIPsWith(v Variant) VIPs {
	if v == Legacy {
		return VIPAddresses
	}
	return VIPRoutes
}

package harness

import (
	"fmt"
	"os"
)

// Mode is a mode of nodeproxy.
type Mode string

// The modes.
const (
	IPTables Mode = "iptables"
	IPVS     Mode = "ipvs"
	NFTables Mode = "nftables"
)

// ModeVariable is the environment variable with the mode in which daemons run; IPTables if it is not set.
const ModeVariable = "NODEPROXY_E2E_MODE"

// ModeUnderTest is the mode that ModeVariable asks for.
func ModeUnderTest() Mode {
	switch m := Mode(os.Getenv(ModeVariable)); m {
	case "":
		return IPTables
	case IPTables, IPVS, NFTables:
		return m
	default:
		panic(fmt.Sprintf("%s=%s: no such mode", ModeVariable, m))
	}
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

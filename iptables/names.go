package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"strconv"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// hashName is 16 characters that stand for a text.
func hashName(text string) string {
	sum := sha256.Sum256([]byte(text))
	return base32.StdEncoding.EncodeToString(sum[:10])
}

// serviceChain names a chain of a ServicePort.
func serviceChain(prefix string, k plan.Key) string {
	return prefix + hashName(k.PortName()+k.Protocol.Lower())
}

// endpointChain names the chain of one endpoint of a ServicePort.
func endpointChain(k plan.Key, ep netip.AddrPort) string {
	return names.PrefixEndpoint + hashName(k.PortName()+k.Protocol.Lower()+ep.String())
}

// groupChain names a branch of the endpoint tree that hangs below a ServicePort's chain.
func groupChain(prefix string, k plan.Key, of, group int) string {
	return prefix + hashName(k.PortName()+k.Protocol.Lower()+" endpoints "+strconv.Itoa(group)+" of "+strconv.Itoa(of))
}

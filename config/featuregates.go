package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"nodeproxy/source"
)

// gateUse is what a feature gate of kube-proxy does here.
type gateUse string

const (
	// gateHonoured is a gate whose values do what they do in kube-proxy.
	gateHonoured gateUse = "honoured"
	// gateFixed is a gate that is always on, as it is in kube-proxy once it is locked. False is refused.
	gateFixed gateUse = "false is refused"
	// gateIgnored is a gate without effect.
	gateIgnored gateUse = "no effect"
)

// featureGate is a gate that some release of kube-proxy from 1.33 to 1.37 knows, or one of another component.
type featureGate struct {
	first, last string // the releases that know it
	use         gateUse
	why         string
}

const (
	forClients   = "how requests to the API server are made is not adjustable"
	forNFTables  = "it is for mode nftables"
	forLogs      = "the form of the log does not depend on it"
	forWindows   = "it is for Windows"
	forOthers    = "nodeproxy knows none of this name; other components may"
	forStability = "no gate that is honoured here is alpha or beta"
)

// proxyGates are the gates that kube-proxy itself reads, or whose feature concerns a service proxy.
var proxyGates = map[string]featureGate{
	"AllowServiceExternalIPs": {"1.36", "1.37", gateHonoured, "false: spec.externalIPs of every Service counts as empty (KEP-5707)"},
	"KubeProxyIPVS":           {"1.37", "1.37", gateHonoured, "false: mode ipvs is refused (KEP-5495)"},

	"LoadBalancerIPMode":            {"1.33", "1.34", gateFixed, "ipMode of a load balancer's address always counts"},
	"PreferSameTrafficDistribution": {"1.33", "1.37", gateFixed, "hints for nodes are always followed"},
	"ServiceTrafficDistribution":    {"1.33", "1.35", gateFixed, "hints for zones are always followed"},
	"TopologyAwareHints":            {"1.33", "1.35", gateFixed, "hints for zones are always followed"},

	"MultiCIDRServiceAllocator": {"1.33", "1.37", gateIgnored, "ServiceCIDR objects are read wherever the API server has them"},

	"KubeProxyNFTablesLocalhostNodePorts": {"1.37", "1.37", gateIgnored, forNFTables},
	"NFTablesNetlink":                     {"1.37", "1.37", gateIgnored, forNFTables},
	"NFTablesProxyMode":                   {"1.33", "1.37", gateIgnored, forNFTables},

	"ComponentFlagz":   {"1.33", "1.37", gateIgnored, "/flagz is not served; nodeproxy config prints what is in force"},
	"ComponentSLIs":    {"1.33", "1.34", gateIgnored, "/metrics/slis is always served"},
	"ComponentStatusz": {"1.33", "1.37", gateIgnored, "/statusz is not served; /readyz says how it goes"},
	"NativeHistograms": {"1.36", "1.37", gateIgnored, "histograms are classic ones"},

	"ContextualLogging":   {"1.33", "1.37", gateIgnored, forLogs},
	"LoggingAlphaOptions": {"1.33", "1.37", gateIgnored, forLogs},
	"LoggingBetaOptions":  {"1.33", "1.37", gateIgnored, forLogs},

	"AllAlpha": {"1.33", "1.37", gateIgnored, forStability},
	"AllBeta":  {"1.33", "1.37", gateIgnored, forStability},

	"AtomicFIFO":                   {"1.36", "1.37", gateIgnored, forClients},
	"ClientsAllowCARotation":       {"1.36", "1.37", gateIgnored, forClients},
	"ClientsAllowCBOR":             {"1.33", "1.37", gateIgnored, forClients},
	"ClientsAllowTLSCacheGC":       {"1.36", "1.37", gateIgnored, forClients},
	"ClientsPreferCBOR":            {"1.33", "1.37", gateIgnored, forClients},
	"InOrderInformers":             {"1.33", "1.37", gateIgnored, forClients},
	"InOrderInformersBatchProcess": {"1.35", "1.37", gateIgnored, forClients},
	"InformerResourceVersion":      {"1.33", "1.37", gateIgnored, forClients},
	"UnlockWhileProcessingFIFO":    {"1.36", "1.37", gateIgnored, forClients},
	"WatchListClient":              {"1.33", "1.37", gateIgnored, forClients},

	"WinDSR":     {"1.33", "1.37", gateIgnored, forWindows},
	"WinOverlay": {"1.33", "1.37", gateIgnored, forWindows},
}

// gateOn reports whether a gate that is on by default is on.
func (e *Effective) gateOn(name string) bool {
	on, given := e.kp.FeatureGates[name]
	return on || !given
}

// gateNamed returns the gate of a name. Components of Kubernetes share one list of gates, which changes with each release, so an unknown
// name may be that of any other component.
func gateNamed(name string) featureGate {
	if gate, known := proxyGates[name]; known {
		return gate
	}
	return featureGate{use: gateIgnored, why: forOthers}
}

// featureGates checks the gates and applies those that have an effect. It refuses a misspelt one: that would not switch off what it is
// meant to.
func (k *checker) featureGates(c *Config) {
	for _, name := range slices.Sorted(maps.Keys(k.kp.FeatureGates)) {
		if other := misspelt(name); other != "" {
			k.check("featureGates", fmt.Errorf("%q is not a feature gate; there is %q", name, other))
		}
		if gate := gateNamed(name); gate.use == gateFixed && !k.kp.FeatureGates[name] {
			k.check("featureGates", fmt.Errorf("%s can't be false: %s", name, gate.why))
		}
	}
	c.Settings.IgnoreExternalIPs = !k.gateOn("AllowServiceExternalIPs")
}

// misspelt returns the gate that an unknown name may mean; "" for none.
func misspelt(name string) string {
	like := func(name string) string { return strings.TrimSuffix(strings.ToLower(name), "s") }
	if _, known := proxyGates[name]; !known {
		for other := range proxyGates {
			if like(name) == like(other) {
				return other
			}
		}
	}
	return ""
}

// gateFindings reports the gates that have no effect.
func (e *Effective) gateFindings() []source.Finding {
	reasons := map[string][]string{}
	for name := range e.kp.FeatureGates {
		if gate := gateNamed(name); gate.use == gateIgnored {
			reasons[gate.why] = append(reasons[gate.why], name)
		}
	}
	var out []source.Finding
	for _, why := range slices.Sorted(maps.Keys(reasons)) {
		names := reasons[why]
		slices.Sort(names)
		detail := fmt.Sprintf("no effect of %s: %s", strings.Join(names, ", "), why)
		out = append(out, e.finding(source.Problem, "featureGates", detail, "it is ignored"))
	}
	return out
}

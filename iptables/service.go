package iptables

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"nodeproxy/iptables/common"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// fragment is what one ServicePort contributes to the rules: chains of its own, all in table nat, and entries in the
// dispatchers. It depends on the ServicePort, the settings, the options and the node, and of all other ServicePorts only on what is
// the same for all: whether rules are compact, and the ranges of cluster IPs.
type fragment struct {
	chains  []xtables.Chain
	entries []entry
}

// entry is what stands in a dispatcher at a key that no other ServicePort has.
type entry struct {
	dispatcher dispatcherID
	key        key
	rules      []string
	from       origin
}

// target is where the last rule leads.
func (e entry) target() string { return xtables.Target(e.rules[len(e.rules)-1]) }

// origin is where the rules of an entry come from: the *plan.ServicePort that they are made of when they are needed, or, of one that is not
// known, the rules themselves as a string, with newlines between them. Origins of different rules differ.
type origin any

// builder makes the fragment of one ServicePort.
type builder struct {
	sp       *plan.ServicePort
	settings *plan.Settings
	node     *plan.Node
	name     string         // namespace/name:port, for comments
	compact  bool           // as few and as light rules as possible
	direct   bool           // endpoints have no chains of their own
	inline   bool           // and the ServicePort has none either
	ranges   []netip.Prefix // of cluster IPs that a rule for all masquerades
	options  Options
	rule     xtables.Rule // the one that is being built
	made     fragment
}

// fragment is what a ServicePort contributes; nothing, if it is nil.
func (r *rules) fragment(sp *plan.ServicePort) fragment {
	if sp == nil {
		return fragment{}
	}
	b := r.builder(sp)
	return fragment{chains: b.chains(), entries: b.entries()}
}

// entries makes the entries in dispatchers.
func (b *builder) entries() []entry {
	for _, f := range b.sp.Frontends {
		b.frontend(f)
	}
	return b.made.entries
}

// frontend makes the entries for a frontend.
func (b *builder) frontend(f plan.Frontend) {
	switch f.Kind {
	case plan.ClusterIP:
		b.clusterIP(f)
	case plan.LoadBalancerIP, plan.ExternalIP, plan.NodePort:
		b.external(f)
	case plan.HealthCheckNodePort:
		r := xtables.NewRule().Proto(f.Protocol).Comment(b.name+" health check node port").Port(f.Protocol, f.Port)
		b.entry(filterNodePorts, f, r.Jump("ACCEPT"))
	}
}

// rulesAt returns the rules of an entry of a dispatcher for a frontend, whose Kind is not set.
func (b *builder) rulesAt(id dispatcherID, f plan.Frontend, from origin) []string {
	sp, is := from.(*plan.ServicePort)
	if !is {
		return strings.Split(from.(string), "\n")
	}
	b.of(sp)
	for f.Kind = plan.ClusterIP; f.Kind <= plan.HealthCheckNodePort; f.Kind++ {
		if sp.Has(f) {
			b.frontend(f)
		}
	}
	var rules []string
	for _, e := range b.made.entries {
		if e.dispatcher == id {
			rules = e.rules
		}
	}
	return rules
}

// chains makes the chains of the ServicePort's own.
func (b *builder) chains() []xtables.Chain {
	sp := b.sp
	if !sp.Any || b.inline {
		return nil
	}
	if b.limited() {
		b.firewallChain()
	}
	if sp.HasExternal() {
		b.externalChain()
	}
	b.policyChain(plan.Cluster)
	b.policyChain(plan.Local)
	if !b.direct {
		for _, ep := range sp.All() {
			b.endpointChain(ep)
		}
	}
	return b.made.chains
}

func (r *rules) builder(sp *plan.ServicePort) *builder { return r.newBuilder().of(sp) }

// newBuilder returns a builder that is of no ServicePort yet.
func (r *rules) newBuilder() *builder {
	return &builder{settings: &r.settings, node: &r.node, compact: r.compact, ranges: r.ranges, options: r.options}
}

// of makes b the builder of a ServicePort. Entries that it has made before are overwritten, but not their rules.
func (b *builder) of(sp *plan.ServicePort) *builder {
	b.sp, b.name, b.made = sp, sp.Key.PortName(), fragment{entries: b.made.entries[:0]}
	// Affinity needs the chains: an endpoint's chain remembers the client.
	b.direct = b.compact && sp.Affinity == 0
	b.inline = b.direct && !b.options.KeepCounters && !sp.HasExternal() &&
		len(sp.ForPolicy(sp.InternalPolicy)) <= maxInlineEndpoints
	return b
}

func (b *builder) entry(d dispatcherID, f plan.Frontend, rules ...string) {
	b.made.entries = append(b.made.entries, entry{dispatcher: d, key: keyOf(f), rules: rules, from: b.sp})
}

func (b *builder) chain(name string, rules ...string) {
	b.made.chains = append(b.made.chains, xtables.Chain{Table: names.NAT, Name: name, Rules: rules})
}

// at begins a rule for traffic to a frontend, with a comment unless that is empty.
func (b *builder) at(f plan.Frontend, comment string) *xtables.Rule {
	r := b.rule.Begin()
	if f.Addr.IsValid() {
		r.DstIP(f.Addr)
	}
	if r.Proto(f.Protocol); comment != "" {
		r.Comment(comment)
	}
	return r.Port(f.Protocol, f.Port)
}

// policyChainName is the chain with the endpoints of a policy.
func (b *builder) policyChainName(p plan.Policy) string {
	if p == plan.Local {
		return serviceChain(names.PrefixLocal, b.sp.Key)
	}
	return serviceChain(names.PrefixCluster, b.sp.Key)
}

// refusal is the comment and target for traffic to a frontend whose policy has no endpoint here: refused if there is none
// anywhere, else dropped without an answer, so that a load balancer or client tries another node.
func (b *builder) refusal() (comment, target string) {
	if b.sp.Any {
		return b.name + " has no local endpoints", "DROP"
	}
	reject := "icmp-port-unreachable"
	switch {
	case b.sp.ResetTCP && b.sp.Key.Protocol == plan.TCP:
		// A client that is refused by ICMP in the middle of a connection goes on trying for minutes.
		reject = "tcp-reset"
	case b.sp.Key.Family == plan.IPv6:
		reject = "icmp6-port-unreachable"
	}
	return b.name + " has no endpoints", "REJECT --reject-with " + reject
}

func (b *builder) clusterIP(f plan.Frontend) {
	if endpoints := b.sp.ForPolicy(b.sp.InternalPolicy); len(endpoints) > 0 {
		if b.inline {
			b.entry(natServices, f, b.inlineRules(f, endpoints)...)
			return
		}
		b.entry(natServices, f, b.at(f, b.name+" cluster IP").Jump(b.policyChainName(b.sp.InternalPolicy)))
		return
	}
	comment, target := b.refusal()
	b.entry(filterServices, f, b.at(f, comment).Jump(target))
}

// external makes the entries for a frontend under the external policy. Even one without endpoints under policy Local goes
// to the ServicePort's external chain, where this node's own traffic is let through; the rest comes out of nat with its
// destination unchanged, and is refused in filter.
func (b *builder) external(f plan.Frontend) {
	target := serviceChain(names.PrefixExternal, b.sp.Key)
	d, refuse, comment := natServices, filterExternal, b.name+" "+kindComment[f.Kind]
	switch {
	case f.Kind == plan.NodePort:
		d, refuse, comment = natNodePorts, filterExternalNodePorts, b.name
	case f.Kind == plan.LoadBalancerIP && b.limited():
		target = serviceChain(names.PrefixFirewall, b.sp.Key)
	}
	switch {
	case b.sp.Any:
		b.entry(d, f, b.at(f, comment).Jump(target))
	case f.Kind != plan.NodePort:
		// Were the address one of the node's own, another Service's node port would get what is to be refused.
		b.entry(d, f, b.at(f, comment).Jump("ACCEPT"))
	}
	if b.sp.Any && f.Kind == plan.LoadBalancerIP && b.limited() {
		b.entry(filterFirewall, f, b.at(f, b.name+" traffic not accepted by "+target).Jump("DROP"))
	}
	if len(b.sp.ForPolicy(b.sp.ExternalPolicy)) == 0 {
		comment, verdict := b.refusal()
		b.entry(refuse, f, b.at(f, comment).Jump(verdict))
	}
}

// kindComment names frontends as kube-proxy's comments do.
var kindComment = map[plan.FrontendKind]string{
	plan.LoadBalancerIP: "loadbalancer IP",
	plan.ExternalIP:     "external IP",
}

// limited reports whether source ranges limit who may reach the load balancer IPs.
func (b *builder) limited() bool {
	return len(b.sp.SourceRanges) > 0 && slices.ContainsFunc(b.sp.Frontends, func(f plan.Frontend) bool {
		return f.Kind == plan.LoadBalancerIP
	})
}

// firewallChain lets the allowed sources through to the external chain. What it does not let through leaves nat with its
// destination unchanged and meets KUBE-PROXY-FIREWALL.
func (b *builder) firewallChain() {
	external := serviceChain(names.PrefixExternal, b.sp.Key)
	comment := b.name + " loadbalancer IP"
	var rules []string
	nodeAllowed := false
	for _, r := range b.sp.SourceRanges {
		rules = append(rules, xtables.NewRule().Src(r).Comment(comment).Jump(external))
		ip := b.node.IP(b.sp.Key.Family)
		nodeAllowed = nodeAllowed || ip.IsValid() && r.Contains(ip)
	}
	// Where the load balancer IP is also a local address, a connection from this node to it has it as source as well.
	for _, f := range b.sp.Frontends {
		if nodeAllowed && f.Kind == plan.LoadBalancerIP {
			rules = append(rules, xtables.NewRule().Src(xtables.Single(f.Addr)).Dst(xtables.Single(f.Addr)).Comment(comment).Jump(external))
		}
	}
	rules = append(rules, xtables.NewRule().Comment("other traffic to "+b.name+" will be dropped by KUBE-PROXY-FIREWALL").Jump("ACCEPT"))
	b.chain(serviceChain(names.PrefixFirewall, b.sp.Key), rules...)
}

// externalChain decides about masquerading and policy for traffic to the external frontends.
func (b *builder) externalChain() {
	to := b.name + " external destinations"
	cluster := b.policyChainName(plan.Cluster)
	var rules []string
	if b.sp.ExternalPolicy == plan.Cluster {
		// The endpoint may be on another node, whose answer must come back through this one.
		rules = append(rules, xtables.NewRule().Comment("masquerade traffic for "+to).Jump(names.MarkMasq))
	} else {
		// What this node's pods and the node itself send never was outside. It goes wherever cluster traffic would, as if
		// it had gone out to the load balancer and come back at a node that has an endpoint.
		if r := b.fromPods(); r != nil {
			rules = append(rules, r.Comment("pod traffic for "+to).Jump(cluster))
		}
		rules = append(rules,
			xtables.NewRule().Comment("masquerade LOCAL traffic for "+to).SrcLocal().Jump(names.MarkMasq),
			xtables.NewRule().Comment("route LOCAL traffic for "+to).SrcLocal().Jump(cluster))
	}
	if len(b.sp.ForPolicy(b.sp.ExternalPolicy)) > 0 {
		rules = append(rules, xtables.NewRule().Jump(b.policyChainName(b.sp.ExternalPolicy)))
	} else {
		rules = append(rules, xtables.NewRule().Comment("other traffic for "+to+" will be dropped").Jump("ACCEPT"))
	}
	b.chain(serviceChain(names.PrefixExternal, b.sp.Key), rules...)
}

// fromPods begins a rule for traffic from local pods; nil where pods can't be recognised.
func (b *builder) fromPods() *xtables.Rule {
	d := b.settings.DetectLocal
	switch {
	case !d.Implemented(b.sp.Key.Family):
		return nil
	case d.ByCIDR():
		return xtables.NewRule().Src(d.CIDR(b.sp.Key.Family))
	}
	return xtables.NewRule().Word(common.PodInterface(d)...)
}

// masqueradeClusterIP is the rule that masquerades traffic to the cluster IP, if any: all of it where so configured, else
// what does not come from pods. The latter reaches the cluster IP through any node that it is routed to, and the answer
// must take the same way back.
//
// Nothing but the cluster IP leads to the chain of a ServicePort without other frontends in the compact form, so the rule need not
// match the cluster IP there.
func (b *builder) masqueradeClusterIP(f plan.Frontend) string {
	return b.masquerade(f, b.compact && !b.sp.HasExternal() && !b.inline)
}

// masquerade is masqueradeClusterIP for a chain that nothing but the cluster IP leads to, if sole is true.
func (b *builder) masquerade(f plan.Frontend, sole bool) string {
	d := &b.settings.DetectLocal
	r := b.rule.Begin()
	switch {
	case within(f.Addr, b.ranges):
		return ""
	case b.settings.MasqueradeAll:
	case !d.Implemented(b.sp.Key.Family):
		return ""
	case d.ByCIDR() && d.CIDR(b.sp.Key.Family).Bits() == 0: // All traffic is from pods.
		return ""
	case d.ByCIDR():
		r.NotSrc(d.CIDR(b.sp.Key.Family))
	}
	if !sole {
		r.DstIP(f.Addr)
	}
	if !b.settings.MasqueradeAll && !d.ByCIDR() {
		r.Word("!").Word(common.PodInterface(*d)...)
	}
	if sole {
		return r.Jump(names.MarkMasq)
	}
	if r.Proto(f.Protocol); !b.compact {
		r.Comment(b.name + " cluster IP")
	}
	return r.Port(f.Protocol, f.Port).Jump(names.MarkMasq)
}

// policyChain makes the chain that picks one of a policy's endpoints.
func (b *builder) policyChain(p plan.Policy) {
	endpoints := b.sp.ForPolicy(p)
	if len(endpoints) == 0 {
		return
	}
	var rules []string
	for _, f := range b.sp.Frontends {
		if f.Kind == plan.ClusterIP && p == b.sp.InternalPolicy {
			if r := b.masqueradeClusterIP(f); r != "" {
				rules = append(rules, r)
			}
		}
	}
	if b.sp.Affinity > 0 {
		for _, ep := range endpoints {
			rules = append(rules, xtables.NewRule().Comment(b.toward(ep)).Word("-m", "recent", "--rcheck", "--seconds",
				strconv.Itoa(int(b.sp.Affinity/time.Second)), "--reap").Word(b.recentList(ep)...).Jump(endpointChain(b.sp.Key, ep.Addr)))
		}
	}
	name := b.policyChainName(p)
	if len(endpoints) <= maxFlatEndpoints {
		b.chain(name, append(rules, b.pick(endpoints)...)...)
		return
	}
	groups, chains := b.groups(p, endpoints)
	b.chain(name, append(rules, groups...)...)
	b.made.chains = append(b.made.chains, chains...)
}

// toward is the comment of a rule that leads to an endpoint.
func (b *builder) toward(ep plan.Endpoint) string { return b.name + " -> " + ep.Addr.String() }

// recentList names the list in which an endpoint's clients are remembered, one for each endpoint chain.
func (b *builder) recentList(ep plan.Endpoint) []string {
	mask := "255.255.255.255"
	if b.sp.Key.Family == plan.IPv6 {
		mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	}
	return []string{"--name", endpointChain(b.sp.Key, ep.Addr), "--mask", mask, "--rsource"}
}

// endpointChain makes the chain that sends to one endpoint.
func (b *builder) endpointChain(ep plan.Endpoint) {
	proto := b.sp.Key.Protocol
	dnat := xtables.NewRule().Proto(proto).Comment(b.name)
	if b.sp.Affinity > 0 {
		dnat.Word("-m", "recent", "--set").Word(b.recentList(ep)...)
	}
	b.chain(endpointChain(b.sp.Key, ep.Addr),
		// A client that is its own endpoint must not see an answer from itself: masquerade hairpin traffic.
		xtables.NewRule().Src(xtables.Single(ep.Addr.Addr())).Comment(b.name).Jump(names.MarkMasq),
		dnat.Word("-m", proto.Lower()).DNAT(ep.Addr))
}

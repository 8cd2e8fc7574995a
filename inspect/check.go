package inspect

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"nodeproxy/inspect/reality"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// Reality is where answers learn what is on the node itself. A field is nil where that can't be found out. None of its functions delays
// a sync, and each returns soon after its context ends.
type Reality struct {
	// Kernel compares what was programmed of a Service with what the kernel holds. It returns the number of things compared, and those
	// that are not as they were written, in words.
	Kernel func(ctx context.Context, svc plan.Service) (things int, differ []string, err error)
	// Changed returns what other programs changed lately of what was programmed, whichever Service it concerns.
	Changed func() []Changed
	// Traffic returns the counters of all ServicePorts.
	Traffic func(ctx context.Context) (map[plan.Key]plan.Traffic, error)
	// Flows returns the connections of the ServicePorts that the kernel tracks and that have not ended, by the endpoint that they go to.
	Flows func(ctx context.Context, ports []*plan.ServicePort) (map[netip.AddrPort]Flows, error)
	// Detour says in what the way of a client's packets to an endpoint differs from that of this node's own; "" if in nothing.
	Detour func(from, to netip.Addr) string
	// Tracked returns how many flows the kernel tracks.
	Tracked func() (TrackedFlows, error)
	// Listeners returns the conflicts of all Services with programs that listen on the node.
	Listeners func() []source.Finding
	// Blocking returns rules of other programs that may keep packets from the ServicePorts, in words; within says whether those in Pods were looked at.
	Blocking func(ctx context.Context, ports []*plan.ServicePort) (list []Blocking, within bool, err error)
	// Endpoints returns what is known of listeners at the endpoints of ServicePorts that are on this node; nothing of those where that can't be known.
	Endpoints func(ctx context.Context, ports []*plan.ServicePort) ([]Listening, error)
	// Reverse returns what the kernel does with the answers of endpoints for the interfaces by which they come.
	Reverse func(ctx context.Context, endpoints []netip.Addr) (*Reverse, error)
	// Ways returns what the kernel does with packets to addresses of a Service.
	Ways func(ctx context.Context, to Places) (*Ways, error)
	// Watches returns how current the objects are.
	Watches func() []source.Watch
}

// Changed is what another program changed of what was programmed.
type Changed struct {
	When time.Time
	// What names the first few things.
	What string
	// Repaired is false as long as it could not be written again.
	Repaired bool
}

// Flows are connections to an endpoint.
type Flows struct {
	// Open is how many there are. Unanswered are those of them, of TCP, on which nothing has come back, and Clients a few addresses that began these.
	Open, Unanswered int
	Clients          []netip.Addr
}

type (
	// Places is reality.Places.
	Places = reality.Places
	// Ways is reality.Ways.
	Ways = reality.Ways
	// Unrouted is reality.Unrouted.
	Unrouted = reality.Unrouted
	// Listening is reality.Listening.
	Listening = reality.Listening
	// Attachment is reality.Attachment.
	Attachment = reality.Attachment
	// Filtered is reality.Filtered.
	Filtered = reality.Filtered
	// Reverse is reality.Reverse.
	Reverse = reality.Reverse
)

// Blocking is a rule of another program that drops or rejects packets, or keeps them from being translated.
type Blocking struct {
	// Rule is the rule as nft or iptables shows it, and Place its table and chain.
	Rule, Place string
	// What is the traffic that it concerns, such as "cluster IP 10.96.0.1:80/TCP", and Answers whether it is what comes back from there.
	What    string
	Answers bool
	// Certain is true if it concerns all of that traffic, whoever sends it.
	Certain bool
	// Untracked says that the rule does not drop it, but keeps it from being tracked, so that nothing translates it.
	Untracked bool
	// Unmasqueraded says that the rule does not drop it, but keeps its source from being translated, and Diverted that it decides first about its
	// destination.
	Unmasqueraded, Diverted bool
	// Policy is true if no rule drops it but the policy of the chain that is Place.
	Policy bool
	// Unmarked says that it changes the mark by which packets are to be masqueraded, Missing that it gives them a source that this node does not have, and
	// ICMP that it drops the errors by which others learn that a packet was too long.
	Unmarked, Missing, ICMP bool
	// Inside says that the rule is in the network namespace of the endpoint, and To is the port to which it diverts what comes; 0 if that is not known.
	Inside bool
	To     uint16
	// Toward is the address to which it diverts what comes; invalid if that is not known.
	Toward netip.Addr
}

// toFilter is what to do about that.
const toFilter = "have the same routes hold for answers (ip rule), or set net.ipv4.conf.%s.rp_filter to 2, which is loose"

// Check is one thing that was looked at on the node.
type Check struct {
	// Name says what was looked at.
	Name string `json:"name"`
	// Result is ok, problem, note, or unknown where it could not be found out.
	Result string `json:"result"`
	// Detail says what was found.
	Detail string `json:"detail"`
}

const (
	ok      = "ok"
	unknown = "unknown"
)

// The codes of diagnoses that follow from checks.
const (
	NotInKernel      = "NotInKernel"      // the kernel does not hold what was programmed
	ChangedByOthers  = "ChangedByOthers"  // another program changed the rules
	StaleConnections = "StaleConnections" // connections to endpoints that are gone
	PortConflict     = "PortConflict"     // a program of the node listens where the Service is
	DroppedByOthers  = "DroppedByOthers"  // another program's rule drops the traffic
	APIServerAway    = "APIServerAway"    // the objects may be out of date
	EndpointStuck    = "EndpointStuck"    // what listens at an endpoint does not accept
	EndpointRefuses  = "EndpointRefuses"  // nothing listens at an endpoint that gets traffic
	AnswersFiltered  = "AnswersFiltered"  // rp_filter drops the answers of endpoints
	NoRoute          = "NoRoute"          // the kernel has no route to an endpoint, or to a cluster IP
	NoNeighbour      = "NoNeighbour"      // the next hop to an endpoint does not answer
	Bridged          = "Bridged"          // packets within a bridge pass no rule
	NoHairpin        = "NoHairpin"        // a Pod can't reach itself
	Unclaimed        = "Unclaimed"        // nobody may have an external IP
	Unanswered       = "Unanswered"       // connections on which nothing comes back
	Detoured         = "Detoured"         // the same, and clients have another way to the endpoint than this node
	Diverted         = "Diverted"         // another program's rule translates the destination first, or has nothing translate it
	Unmasqueraded    = "Unmasqueraded"    // another program's rule keeps the source from being translated
	NotForwarded     = "NotForwarded"     // this node does not forward packets
	Untracked        = "Untracked"        // another program's rule keeps the traffic from being tracked
	TrackingFull     = "TrackingFull"     // the kernel tracks as many connections as it may, or nearly
	Overlap          = "Overlap"          // the range of Pods is that of hosts, too
	LeavesNode       = "LeavesNode"       // packets for a Pod of this node leave it by the default route
	ForgottenEarly   = "ForgottenEarly"   // the kernel forgets idle connections soon
	LongPackets      = "LongPackets"      // Pods' packets may be too long for the uplink
	ICMPDropped      = "ICMPDropped"      // and another program's rule drops what tells them so
	SharedAddress    = "SharedAddress"    // several Pods have the address of an endpoint
	Detached         = "Detached"         // the interface of a Pod is down, or no port of its bridge
	DifferentMTU     = "DifferentMTU"     // the ends of a Pod's pair of interfaces take packets of different lengths
	WrongNeighbour   = "WrongNeighbour"   // an entry that somebody has made says where an endpoint or its next hop is
	AnswersAstray    = "AnswersAstray"    // the answers to clients outside leave by another way
	ShutByIPsec      = "ShutByIPsec"      // a policy of IPsec has packets dropped
)

// checkTime bounds the time of all checks of one explanation.
const checkTime = 3 * time.Second

// Check looks at the node, and adds what it finds to an explanation.
func (n *Node) Check(ctx context.Context, e *Explanation) {
	if n.Reality == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	svc := plan.Service{Namespace: e.Namespace, Name: e.Name}
	var ports []*plan.ServicePort
	var frontends map[netip.AddrPort]proxier.Owned
	masqueradeAll, nowhere := false, map[netip.Addr]bool{}
	n.View(func(s *proxier.State) {
		masqueradeAll = s.Plan().Settings.MasqueradeAll
		if d, found := s.Describe(svc); found {
			ports, frontends = d.ServicePorts, d.Frontends
			for _, sp := range ports {
				for _, ep := range d.Endpoints(sp.Key) {
					nowhere[ep.Addr.Addr()] = ep.Node == ""
				}
			}
		}
	})
	c := &checks{reality: n.Reality, svc: svc, ports: ports, frontends: frontends, nowhere: nowhere, masqueradeAll: masqueradeAll, now: time.Now()}
	all := []func(*checks, context.Context){(*checks).kernel, (*checks).traffic, (*checks).flows, (*checks).tracked, (*checks).listeners, (*checks).blocking,
		(*checks).endpoints, (*checks).ways, (*checks).reverse, (*checks).watches}
	if len(e.byPods) > 0 { // No rule is for these.
		c.ports, c.headless = e.byPods, true
		all = []func(*checks, context.Context){(*checks).endpoints, (*checks).ways, (*checks).reverse, (*checks).watches}
	}
	each := make([]checks, len(all))
	var wg sync.WaitGroup
	for i, check := range all {
		each[i] = *c
		wg.Go(func() {
			defer each[i].survive()
			check(&each[i], ctx)
		})
	}
	wg.Wait()
	for _, one := range each {
		e.Checks = append(e.Checks, one.list...)
		e.Diagnoses = append(e.Diagnoses, one.diagnoses...)
	}
	weigh(e)
	if slices.ContainsFunc(e.Diagnoses, func(d Diagnosis) bool { return d.Severity == problem && causes[d.Code] }) { // It says why.
		e.Diagnoses = slices.DeleteFunc(e.Diagnoses, func(d Diagnosis) bool { return d.Code == Unanswered })
	}
	if slices.ContainsFunc(e.Diagnoses, func(d Diagnosis) bool { return d.Severity == problem && d.Code == Unanswered }) {
		for _, one := range each {
			e.Diagnoses = append(e.Diagnoses, one.suspects...)
		}
	}
	slices.SortStableFunc(e.Diagnoses, func(a, b Diagnosis) int { return -cmp.Compare(a.Severity, b.Severity) })
}

// weigh gives diagnoses their weight beside others: what may be means more where connections have no answer, and what follows from something else is not
// said.
func weigh(e *Explanation) {
	of := func(code string) (out []*Diagnosis) {
		for i := range e.Diagnoses {
			if e.Diagnoses[i].Code == code {
				out = append(out, &e.Diagnoses[i])
			}
		}
		return out
	}
	if long, dropped := of(LongPackets), of(ICMPDropped); len(long) > 0 && len(dropped) > 0 {
		long[0].Severity, dropped[0].Severity = problem, problem
	}
	if slices.ContainsFunc(of(Unanswered), func(d *Diagnosis) bool { return d.Severity == problem }) {
		for _, d := range slices.Concat(of(LeavesNode), of(AnswersAstray)) {
			d.Severity = problem
		}
	}
	var explained []*Diagnosis
	if refusing := of(EndpointRefuses); len(e.byPods) > 0 && len(refusing) > 0 && len(of(PortsByName)) > 0 { // The Service has clients use the wrong one.
		explained, refusing[0].Severity = of(PortsByName), problem
	}
	for _, d := range of(Diverted) { // By the connections, the rule does decide.
		for _, stale := range of(StaleConnections) {
			if d.Do == byLeftovers && slices.ContainsFunc(d.about, func(a netip.Addr) bool { return slices.Contains(stale.about, a) }) {
				d.Severity, explained = problem, append(explained, stale)
				d.What += " Connections to that address show that it does."
			}
		}
	}
	var detached []netip.Addr // So nobody answers there.
	for _, d := range of(Detached) {
		detached = append(detached, d.about...)
	}
	for _, silent := range of(NoNeighbour) {
		if len(silent.about) > 0 && !slices.ContainsFunc(silent.about, func(a netip.Addr) bool { return !slices.Contains(detached, a) }) {
			explained = append(explained, silent)
		}
	}
	for _, d := range of(ICMPDropped) {
		if d.Severity != problem {
			explained = append(explained, d)
		}
	}
	var rest []Diagnosis
	for i := range e.Diagnoses {
		if !slices.Contains(explained, &e.Diagnoses[i]) {
			rest = append(rest, e.Diagnoses[i])
		}
	}
	e.Diagnoses = rest
}

// causes are the codes of what has connections without an answer.
var causes = map[string]bool{
	DroppedByOthers: true, Untracked: true, Unmasqueraded: true, Diverted: true, NoRoute: true, NoNeighbour: true, NotForwarded: true, Bridged: true,
	AnswersFiltered: true, EndpointStuck: true, EndpointIsService: true, PodGone: true, SharedAddress: true, Detached: true, DifferentMTU: true, WrongNeighbour: true, AnswersAstray: true, LeavesNode: true, ShutByIPsec: true,
}

// checks collects what is found about one Service.
type checks struct {
	reality *Reality
	svc     plan.Service
	ports   []*plan.ServicePort
	// frontends are endpoints that are frontends of Services, of which there is a diagnosis already.
	frontends map[netip.AddrPort]proxier.Owned
	// nowhere are the endpoints of which no node is named.
	nowhere map[netip.Addr]bool
	// masqueradeAll is true if endpoints answer to this node in any case.
	masqueradeAll bool
	// headless is true where clients go to the ports themselves.
	headless  bool
	now       time.Time
	list      []Check
	diagnoses []Diagnosis
	// suspects are said where connections have no answer and nothing else says why.
	suspects []Diagnosis
}

// survive must be deferred: a check reads what other programs have written, and a fault in that must not end the proxy.
func (c *checks) survive() {
	if fault := recover(); fault != nil {
		c.found("checks", unknown, "one of them failed: %v", fault)
	}
}

func (c *checks) found(name, result, format string, args ...any) {
	c.list = append(c.list, Check{name, result, fmt.Sprintf(format, args...)})
}

func (c *checks) diagnose(severity, code, do, what string, args ...any) {
	c.diagnoses = append(c.diagnoses, Diagnosis{Severity: severity, Code: code, What: fmt.Sprintf(what, args...), Do: do})
}

// about says which addresses the last diagnosis is about.
func (c *checks) about(list ...netip.Addr) { c.diagnoses[len(c.diagnoses)-1].about = list }

func (c *checks) suspect(code, do, what string, args ...any) {
	c.suspects = append(c.suspects, Diagnosis{Severity: note, Code: code, What: fmt.Sprintf(what, args...), Do: do})
}

// ago is such as "3s ago".
func (c *checks) ago(t time.Time) string { return duration.HumanDuration(c.now.Sub(t)) + " ago" }

// kernel is about what the kernel holds.
func (c *checks) kernel(ctx context.Context) {
	const name = "rules in the kernel"
	if c.reality.Kernel != nil && len(c.ports) > 0 {
		things, differ, err := c.reality.Kernel(ctx, c.svc)
		switch {
		case err != nil:
			c.found(name, unknown, "%v", err)
		case len(differ) > 0:
			c.found(name, problem, "%d of %d are not as written: %s", len(differ), things, some(differ))
			c.diagnose(problem, NotInKernel, "wait a moment, as nodeproxy writes them again; if it stays so, its log says why it can't",
				"The kernel does not hold what was programmed: another program has changed it (%s).", some(differ))
		default:
			c.found(name, ok, "all %d are as written", things)
		}
	}
	if c.reality.Changed == nil {
		return
	}
	list := c.reality.Changed()
	if len(list) == 0 {
		return
	}
	last := list[len(list)-1]
	severity, state := note, "nodeproxy has written it again"
	if !last.Repaired {
		severity, state = problem, "nodeproxy could not write it again yet"
	}
	times := ""
	if len(list) > 1 {
		times = fmt.Sprintf(", the last of %d times within %s", len(list), duration.HumanDuration(c.now.Sub(list[0].When)))
	}
	if len(list) >= 3 {
		severity = problem
	}
	c.found("changes by other programs", severity, "%s%s: %s", c.ago(last.When), times, last.What)
	c.diagnose(severity, ChangedByOthers, "find the program that does this, if connections failed then",
		"Another program changed what nodeproxy had programmed, %s%s, and %s: %s.", c.ago(last.When), times, state, last.What)
}

// traffic is about counters.
func (c *checks) traffic(ctx context.Context) {
	if c.reality.Traffic == nil || len(c.ports) == 0 {
		return
	}
	const name = "traffic"
	all, err := c.reality.Traffic(ctx)
	if err != nil {
		c.found(name, unknown, "%v", err)
		return
	}
	for _, sp := range c.ports {
		t, counted := all[sp.Key]
		if !counted {
			continue
		}
		port := ""
		if len(c.ports) > 1 {
			port = fmt.Sprintf(" (port %q, %s)", sp.Key.Port, sp.Key.Family)
		}
		text := amount(t.Connections, "connection")
		if t.PacketsIn != plan.NotCounted {
			text += fmt.Sprintf(", %s in, %s out", amount(t.PacketsIn, "packet"), amount(t.PacketsOut, "packet"))
		}
		c.found(name, ok, "%s since the rules were written%s", text, port)
	}
}

// forgets is about connections that the kernel forgets soon.
func (c *checks) forgets(after int) {
	if after == 0 || !slices.ContainsFunc(c.ports, func(sp *plan.ServicePort) bool { return sp.Key.Protocol == plan.TCP }) {
		return
	}
	severity := note
	if after < soon {
		severity = problem
	}
	c.found("connection tracking", severity, "established connections are forgotten after %d s", after)
	c.diagnose(severity, ForgottenEarly, "see what has lowered it, and restart nodeproxy, or set net.netfilter.nf_conntrack_tcp_timeout_established again",
		"The kernel forgets connections of TCP that are silent for %d s (net.netfilter.nf_conntrack_tcp_timeout_established), which is less than nodeproxy had set: what comes later on them is reset or lost.", after)
}

// soon is the number of seconds within which any connection may be silent.
const soon = 60

// amount is such as "1 packet" or "2 packets".
func amount(n int64, of string) string {
	if n == 1 {
		return "1 " + of
	}
	return fmt.Sprintf("%d %ss", n, of)
}

// flows is about connections.
func (c *checks) flows(ctx context.Context) {
	if c.reality.Flows == nil || len(c.ports) == 0 {
		return
	}
	const name = "connections"
	flows, err := c.reality.Flows(ctx, c.ports)
	if err != nil {
		c.found(name, unknown, "%v", err)
		return
	}
	current := map[netip.AddrPort]bool{}
	for _, sp := range c.ports {
		for _, ep := range sp.All() {
			current[ep.Addr] = true
		}
		for _, ex := range sp.Excluded {
			current[ex.Addr] = true
		}
	}
	var endpoints []netip.AddrPort
	for a := range flows {
		endpoints = append(endpoints, a)
	}
	slices.SortFunc(endpoints, func(a, b netip.AddrPort) int { return cmp.Or(cmp.Compare(flows[b].Open, flows[a].Open), a.Compare(b)) })
	total, stale := 0, 0
	result := ok
	var words, gone []string
	var goneTo []netip.Addr
	for _, a := range endpoints {
		n := flows[a].Open
		total += n
		text := fmt.Sprintf("%d to %s", n, a)
		switch {
		case !a.IsValid():
			text = fmt.Sprintf("%d to no endpoint", n)
		case !current[a]:
			text += ", which is no endpoint"
			stale += n
			gone, goneTo = append(gone, a.String()), append(goneTo, a.Addr())
		}
		if u := flows[a].Unanswered; u > 0 {
			text += fmt.Sprintf(" (%d without an answer)", u)
			result = severer(result, c.unanswered(a, flows[a], current[a]))
		}
		words = append(words, text)
	}
	if total == 0 {
		c.found(name, ok, "none is open")
		return
	}
	if stale > 0 {
		result = severer(result, note)
		first, family := netip.MustParseAddrPort(gone[0]).Addr(), ""
		if first.Is6() {
			family = "-f ipv6 "
		}
		c.diagnose(note, StaleConnections, fmt.Sprintf("if clients hang, let them connect anew, or delete what is tracked: conntrack -D %s--reply-src %s", family, first),
			"%s of the Service still %s to what is no longer an endpoint: %s.", upper(amount(int64(stale), "connection")), goes(stale), some(gone))
		c.about(goneTo...)
	}
	c.found(name, result, "%d tracked: %s", total, some(words))
}

// manyUnanswered is how many connections to an endpoint are not in their first moment by chance, where none of them is answered.
const manyUnanswered = 3

// unanswered is about connections to an endpoint on which nothing has come back, and returns how bad that is: a few may have begun just now, and those to
// what was an endpoint before.
func (c *checks) unanswered(endpoint netip.AddrPort, f Flows, current bool) (severity string) {
	severity = note
	switch {
	case current && f.Unanswered == f.Open && f.Open >= manyUnanswered:
		severity = problem
	case 20*f.Unanswered < f.Open: // As on any busy endpoint.
		return ok
	}
	to, detour := endpoint.String(), ""
	do := "see whether the packets get there, and whether the answers come back to this node: tcpdump -ni any host " + endpoint.Addr().String() + "; such entries stay for two minutes after their cause is gone"
	if !endpoint.IsValid() {
		to, do = "no endpoint", "find out why they are not translated: nodeproxy trace --live"
	}
	var clients []string
	for _, from := range f.Clients {
		clients = append(clients, from.String())
		if c.reality.Detour != nil && detour == "" && endpoint.IsValid() {
			if detour = c.reality.Detour(from, endpoint.Addr()); detour != "" {
				detour = "; " + detour
			}
		}
	}
	code := Unanswered
	if detour != "" { // Which may be the cause.
		code = Detoured
	}
	c.diagnose(severity, code, do,
		"%d of the %d tracked connections to %s %s without an answer, from %s%s.", f.Unanswered, f.Open, to, are(f.Unanswered), some(clients), detour)
	return severity
}

// severer returns the worse of two results.
func severer(a, b string) string {
	order := []string{ok, note, problem}
	if slices.Index(order, b) > slices.Index(order, a) {
		return b
	}
	return a
}

// moreFlows is what to do about that.
const moreFlows = "raise net.netfilter.nf_conntrack_max (--conntrack-max-per-core, --conntrack-min), and see whose flows they are: conntrack -L"

// tracked is about the room for connections, of all programs.
func (c *checks) tracked(context.Context) {
	if c.reality.Tracked == nil {
		return
	}
	const name = "connection tracking"
	t, err := c.reality.Tracked()
	defer c.forgets(t.Forgets)
	switch {
	case err != nil:
		c.found(name, unknown, "%v", err)
	case t.full():
		c.found(name, problem, "the kernel tracks %d flows, and no more than %d", t.Flows, t.Most)
		c.diagnose(problem, TrackingFull, moreFlows, "The kernel may drop new connections of any kind: it tracks %d flows, and no more than %d.", t.Flows, t.Most)
	case t.Most > 0 && t.Flows >= t.Most-t.Most/10:
		c.found(name, note, "the kernel tracks %d flows, and no more than %d", t.Flows, t.Most)
		c.diagnose(note, TrackingFull, moreFlows, "The kernel has little room for new connections: it tracks %d flows, and no more than %d.", t.Flows, t.Most)
	default:
		c.found(name, ok, "%d of at most %d flows of all programs", t.Flows, t.Most)
	}
}

func goes(n int) string {
	if n == 1 {
		return "goes"
	}
	return "go"
}

// listeners is about programs that listen where the Service is.
func (c *checks) listeners(context.Context) {
	if c.reality.Listeners == nil || len(c.ports) == 0 {
		return
	}
	const name = "listeners on the node"
	none := true
	for _, f := range c.reality.Listeners() {
		if f.Object != "Service "+c.svc.String() {
			continue
		}
		severity := note
		if f.Severity == source.Problem {
			severity = problem
		}
		none = false
		c.found(name, severity, "%s", f.Detail)
		c.diagnose(severity, PortConflict, "end that program, or give one of the two another port", "%s: %s.", upper(f.Detail), f.Effect)
	}
	if none {
		c.found(name, ok, "no other program listens at its addresses and ports")
	}
}

// blocking is about other programs' rules.
func (c *checks) blocking(ctx context.Context) {
	if c.reality.Blocking == nil || len(c.ports) == 0 {
		return
	}
	const name = "rules of other programs"
	list, within, err := c.reality.Blocking(ctx, c.ports)
	if err != nil {
		c.found(name, unknown, "%v", err)
		return
	}
	if !slices.ContainsFunc(list, func(b Blocking) bool { return !b.ICMP }) {
		not := "tc, eBPF, ebtables and the rules in Pods"
		if within {
			not = "tc, eBPF and ebtables"
		}
		c.found(name, ok, "none that drops what is for the Service or its answers, or keeps it from being tracked, was found in nftables or iptables; %s are not looked at", not)
	}
	for _, b := range list {
		c.rule(name, b)
	}
}

// rule is about one rule of another program.
func (c *checks) rule(name string, b Blocking) {
	severity, drops := note, "may drop"
	if b.Certain {
		severity, drops = problem, "drops"
	}
	if strings.HasSuffix(b.Rule, "reject") {
		drops = map[bool]string{true: "rejects", false: "may reject"}[b.Certain]
	}
	traffic := "what is for " + b.What
	if b.Answers {
		traffic = "the answers of " + b.What
	}
	whose, admit := "another program", "let its owner admit this traffic"
	if b.Inside {
		b.Place += ", in the network namespace of its Pod"
		whose, admit = "the Pod itself", "see what has put it there: nsenter -t PID -n nft list ruleset, with the PID of a process of the Pod"
	}
	if b.ICMP {
		c.diagnose(note, ICMPDropped, admit+" (ICMP, type 3)", "A rule of %s drops the errors by which this node tells others that a packet was too long: \"%s\" in %s. So these go on to send such packets, which get lost.", whose, b.Rule, b.Place)
		return
	}
	c.found(name, severity, "%s: %s", b.Place, b.Rule)
	if b.Unmarked || b.Missing {
		c.changed(b, severity, whose)
		return
	}
	if b.Inside && b.Diverted {
		where := "somewhere else"
		if b.To != 0 {
			where = fmt.Sprintf("to port %d, where nothing listens", b.To)
		}
		c.diagnose(severity, Diverted, "see whether the sidecar that belongs to it runs, as one of a service mesh, or remove the rule",
			"A rule in the Pod sends what comes for %s %s: \"%s\" in %s.", b.What, where, b.Rule, b.Place)
		return
	}
	if o, known := ownerAt(b.Place); known {
		whose, admit = o.name, o.admit
	}
	if b.Untracked {
		does, do := "keeps", "let its owner except this traffic"
		if !b.Certain {
			does, do = "may keep", "nothing, if a program of this node answers there, as the NodeLocal DNS cache does; else "+do
		}
		c.diagnose(severity, Untracked, do, "A rule of %s %s %s from being tracked, so that nothing translates it: \"%s\" in %s.", whose, does, traffic, b.Rule, b.Place)
		return
	}
	if b.Unmasqueraded {
		c.diagnose(severity, Unmasqueraded, "let its owner except what is marked to be masqueraded, or put the rule behind the jump to KUBE-POSTROUTING",
			"A rule of %s ends the chain before what is for %s can be masqueraded: \"%s\" in %s. Endpoints on other nodes answer past this node, and those connections hang.", whose, b.What, b.Rule, b.Place)
		return
	}
	if b.Diverted {
		decides := "decides first"
		if !b.Certain {
			decides = "may decide first, as it has the same priority,"
		}
		if admit != byLeftovers {
			admit = "remove it, or have its owner except this traffic"
		}
		c.diagnose(severity, Diverted, admit, "A rule of %s %s about %s, so that it does not get to the endpoints: \"%s\" in %s.", whose, decides, b.What, b.Rule, b.Place)
		c.about(b.Toward)
		return
	}
	if b.Policy {
		why := "none accepts this"
		if !b.Certain {
			why = "none certainly accepts this, whoever sends it"
		}
		c.diagnose(severity, DroppedByOthers, admit+", unless connections succeed",
			"The policy of %s %s %s: it drops what no rule accepts, and %s.", b.Place, drops, traffic, why)
		return
	}
	c.diagnose(severity, DroppedByOthers, admit,
		"A rule of %s %s %s: \"%s\" in %s.", whose, drops, traffic, b.Rule, b.Place)
}

// changed is about a rule that changes packets in such a way that answers do not come back.
func (c *checks) changed(b Blocking, severity, whose string) {
	can := map[bool]string{true: "", false: "may "}[b.Certain]
	if b.Missing {
		c.diagnose(severity, Unmasqueraded, "correct the rule, or have its owner write it anew, as after a change of the node's address",
			"A rule of %s gives what is for %s a source address that this node does not have, so that answers %sgo elsewhere: \"%s\" in %s.", whose, b.What, can, b.Rule, b.Place)
		return
	}
	changes := map[bool]string{true: "changes", false: "may change"}[b.Certain]
	c.diagnose(severity, Unmasqueraded, "have its owner set some bits alone (--set-xmark VALUE/MASK, --nfmask), without that of nodeproxy (iptables.masqueradeBit, nftables.masqueradeBit)",
		"A rule of %s %s the mark by which what is for %s is to be masqueraded: \"%s\" in %s. Endpoints on other nodes answer past this node, and those connections hang.",
		whose, changes, b.What, b.Rule, b.Place)
}

// endpoints is about what listens at the endpoints that are on this node.
func (c *checks) endpoints(ctx context.Context) {
	if c.reality.Endpoints == nil || len(c.ports) == 0 {
		return
	}
	const name = "listeners at endpoints"
	list, err := c.reality.Endpoints(ctx, c.ports)
	if err != nil {
		c.found(name, unknown, "%v", err)
		return
	}
	if len(list) == 0 { // None is on this node, or nothing can be known of it.
		return
	}
	badly := c.attachments(list)
	if list = slices.DeleteFunc(list, func(l Listening) bool { return badly[l.Addr.Addr()] }); len(list) == 0 {
		return
	}
	var refusing []Listening
	for _, l := range list {
		if _, is := c.frontends[l.Addr]; !l.Listens && !is {
			refusing = append(refusing, l)
		}
	}
	stuck := c.stuck(list)
	if len(refusing) == 0 && stuck > 0 {
		c.found(name, problem, "at %d of %d that are known on this node, what listens does not accept", stuck, len(list))
		return
	}
	if len(refusing) == 0 {
		c.found(name, ok, "something listens at all that are known on this node: %d", len(list))
		return
	}
	severity, n := note, len(refusing)
	for len(refusing) > 0 { // Those that refuse for the same reason are in one sentence.
		first, names := refusing[0], []string(nil)
		refusing = slices.DeleteFunc(refusing, func(l Listening) bool {
			same := l.Addr.Port() == first.Addr.Port() && l.Protocol == first.Protocol && l.Pod == first.Pod && l.Loopback == first.Loopback && l.OtherFamily == first.OtherFamily && slices.Equal(l.At, first.At) && l.Other == first.Other && slices.Equal(l.Others, first.Others)
			if same {
				names = append(names, l.Addr.String())
			}
			return same
		})
		differs := slices.ContainsFunc(list, func(l Listening) bool {
			return l.Listens && l.Protocol == first.Protocol && l.Addr.Port() == first.Addr.Port()
		})
		if c.refuses(first, names, differs) == problem {
			severity = problem
		}
	}
	c.found(name, severity, "nothing listens at %d of %d that are known on this node", n, len(list))
}

// attachments is about Pods that are not attached to this node as they should be. It returns their addresses.
func (c *checks) attachments(list []Listening) (said map[netip.Addr]bool) {
	const name = "listeners at endpoints"
	said = map[netip.Addr]bool{}
	for _, l := range list {
		a, at := l.Addr.Addr(), l.Attachment
		if !l.Several && at == (Attachment{}) || said[a] {
			continue
		}
		said[a] = true
		wrong := func(code, do, found, what string) {
			c.found(name, problem, "%s", found)
			c.diagnose(problem, code, do, "%s", what)
			c.about(a)
		}
		fail := ", and connections that go there fail."
		switch of := "Endpoint " + l.Addr.String(); {
		case l.Several:
			wrong(SharedAddress, "see what gives addresses to Pods on this node (the network plugin's IPAM), and delete the Pods that have this one: kubectl get pods -A -o wide | grep -w "+a.String(),
				fmt.Sprintf("several Pods have the address %s", a), fmt.Sprintf("More than one Pod on this node has the address of endpoint %s, and connections go to one or the other.", l.Addr))
		case at.Down:
			which := at.Link
			if at.Bridge != "" {
				which += " or its bridge " + at.Bridge
			}
			wrong(Detached, "see which is down, and what has taken it down: ip link; ip link set NAME up",
				which+" is down", fmt.Sprintf("%s is in a Pod whose interface on this node is down (%s)%s", of, which, fail))
		case at.By != "":
			port := ""
			if at.Bridge != "" {
				port = ", a port of " + at.Bridge
			}
			wrong(NoRoute, fmt.Sprintf("see what has made that route, and whether interfaces have the same network: ip addr; ip rule; ip route get %s", a), fmt.Sprintf("%s is at %s, and not at %s", a, at.Link, at.By),
				fmt.Sprintf("%s is in a Pod of this node, at %s%s, but packets for it leave by %s%s", of, at.Link, port, at.By, fail))
		case at.Loose:
			wrong(Detached, fmt.Sprintf("ip link set %s master %s, and see what has taken it out; or delete the Pod, so that another takes its place", at.Link, at.Bridge),
				fmt.Sprintf("%s is not a port of %s", at.Link, at.Bridge), fmt.Sprintf("%s is in a Pod whose interface on this node, %s, is not a port of %s, by which packets for it leave%s", of, at.Link, at.Bridge, fail))
		case at.Wrong != "":
			wrong(WrongNeighbour, "delete the entry, which somebody has made (permanent), and see who: ip neigh show to "+a.String(), fmt.Sprintf("%s is not at %s", a, at.Wrong),
				fmt.Sprintf("This node sends what is for endpoint %s to %s, by an entry of its neighbours that is permanent, but no interface of the Pod has that address%s", l.Addr, at.Wrong, fail))
		case at.NoRoute == "" && at.NoDefault != "" && at.MTU == at.OwnMTU:
			c.noDefault(l, name)
		case at.NoRoute != "":
			wrong(NoRoute, "see the routes in the Pod, which the network plugin makes: nsenter -t PID -n ip route, with the PID of a process of the Pod", fmt.Sprintf("answers of the Pod of %s do not get here", a),
				fmt.Sprintf("%s is in a Pod whose answers do not get to this node (%s), and connections from here, the node's own and masqueraded ones, fail.", of, at.NoRoute))
		default:
			wrong(DifferentMTU, "give both the same MTU, in the configuration of the network plugin", fmt.Sprintf("%s has an MTU of %d, and its other end %d", at.Link, at.MTU, at.OwnMTU),
				fmt.Sprintf("%s is in a Pod whose interface has an MTU of %d bytes, while its other end on this node, %s, has %d: packets longer than the smaller are lost without a word, so that connections begin and then hang.",
					of, at.OwnMTU, at.Link, at.MTU))
		}
	}
	return said
}

// noDefault is about a Pod that answers to this node, and to others only as far as its routes go.
func (c *checks) noDefault(l Listening, name string) {
	severity := note
	if slices.ContainsFunc(c.ports, func(sp *plan.ServicePort) bool { return sp.ExternalPolicy == plan.Local && sp.HasExternal() }) {
		severity = problem
	}
	c.found(name, severity, "the Pod of %s has no route to other hosts", l.Addr.Addr())
	c.diagnose(severity, NoRoute, "see the routes in the Pod, which the network plugin makes: nsenter -t PID -n ip route, with the PID of a process of the Pod",
		"Endpoint %s is in a Pod that has no route to other hosts (%s): what reaches it without being masqueraded, as with externalTrafficPolicy Local, is not answered.", l.Addr, l.Attachment.NoDefault)
}

// stuck is about endpoints whose programs listen and do not take what comes. It returns how many there are.
func (c *checks) stuck(list []Listening) (n int) {
	for _, l := range list {
		if _, is := c.frontends[l.Addr]; l.Waiting == 0 || is {
			continue
		}
		where, what := "on this node", amount(int64(l.Waiting), "connection")
		if l.Pod {
			where = "in its Pod"
		}
		if l.Protocol == plan.UDP {
			what = amount(int64(l.Waiting), "byte")
		}
		if n++; n <= mostFiltered {
			c.diagnose(problem, EndpointStuck, "see whether the program hangs or has too much to do, and have its readiness probe ask this port",
				"Endpoint %s gets traffic, but the program that listens at port %d/%s %s does not take it now, and clients wait. Its queue had %s, and no less a moment later.",
				l.Addr, l.Addr.Port(), l.Protocol, where, what)
		}
	}
	return n
}

// refuses says why endpoints refuse what they get, and returns how bad that is. differs says that something listens at this port of other endpoints.
func (c *checks) refuses(l Listening, names []string, differs bool) (severity string) {
	severity = problem
	who, where := "Endpoint "+names[0]+" gets traffic, but refuses it", "on this node"
	if len(names) > 1 {
		who = "Endpoints " + some(names) + " get traffic, but refuse it"
	}
	if l.Pod {
		where = "in its Pod"
		if len(names) > 1 {
			where = "in their Pods"
		}
	}
	port := fmt.Sprintf("%d/%s", l.Addr.Port(), l.Protocol)
	if l.Loopback {
		unless := ""
		if l.Pod && len(l.Others) > 0 { // A service mesh does that.
			severity, unless = note, ", unless another program there passes it on"
		}
		c.diagnose(severity, EndpointRefuses, "have the program listen at all addresses (0.0.0.0 or ::)",
			"%s%s: what listens at port %s %s does so at a loopback address alone.", who, unless, port, where)
		return severity
	}
	if len(l.At) > 0 {
		var list []string
		for _, a := range l.At {
			list = append(list, a.String())
		}
		c.diagnose(severity, EndpointRefuses, "have the program listen at all addresses (0.0.0.0 or ::), or at this one", "%s: what listens at port %s %s does so at %s alone.", who, port, where, some(list))
		return severity
	}
	if l.OtherFamily {
		other := plan.IPv6
		if l.Addr.Addr().Is6() {
			other = plan.IPv4
		}
		c.diagnose(severity, EndpointRefuses, "have the program listen by both families (at ::, without IPV6_V6ONLY), or limit spec.ipFamilies to "+other.String(),
			"%s: what listens at port %s %s does so by %s alone.", who, port, where, other)
		return severity
	}
	if l.Other != "" {
		c.diagnose(severity, EndpointRefuses, fmt.Sprintf("set spec.ports[].protocol to %s, and that of the container port", l.Other),
			"%s: nothing listens at port %s %s, but something does at %d/%s.", who, port, where, l.Addr.Port(), l.Other)
		return severity
	}
	var list []string
	for _, o := range l.Others {
		list = append(list, fmt.Sprint(o))
	}
	others := ""
	switch {
	case !l.Pod: // They are those of all programs of the node.
	case len(list) == 1:
		others = "; the only port at which anything does is " + list[0]
	case len(list) > 1:
		others = "; the ports at which anything does are " + some(list)
	}
	do := "set spec.ports[].targetPort to the port at which the program listens, or have it listen at this one"
	if differs {
		do = "have its program listen at this port, as those of other endpoints do, or, if it is another app's Pod, have spec.selector leave it out"
	}
	if c.headless {
		do = "have clients use the port at which the program listens, and set spec.ports[].port to it: nothing translates the ports of a headless Service"
		severity = note // Clients may use another.
	}
	c.diagnose(severity, EndpointRefuses, do,
		"%s: nothing listens at port %s %s%s.", who, port, where, others)
	return severity
}

// used are the addresses of endpoints of a family that get traffic, up to a number, and how many there are.
func (c *checks) used(f plan.Family) (some []netip.Addr, all int) {
	seen := map[netip.Addr]bool{}
	for _, sp := range c.ports {
		for _, ep := range sp.All() {
			if a := ep.Addr.Addr(); sp.Key.Family == f && !seen[a] {
				seen[a] = true
				if len(some) < mostAddresses {
					some = append(some, a)
				}
			}
		}
	}
	return some, len(seen)
}

// ways is about the ways to endpoints, and to the Service itself.
func (c *checks) ways(ctx context.Context) {
	if c.reality.Ways == nil {
		return
	}
	const name = "routes to endpoints"
	var to Places
	all := 0
	for _, f := range plan.Families {
		some, n := c.used(f)
		to.Endpoints, all = append(to.Endpoints, some...), all+n
	}
	for _, sp := range c.ports {
		for _, f := range sp.Frontends {
			switch {
			case f.Kind == plan.ClusterIP && !slices.Contains(to.ClusterIPs, f.Addr):
				to.ClusterIPs = append(to.ClusterIPs, f.Addr)
			case f.Kind == plan.ExternalIP && len(to.ExternalIPs) < mostAddresses && !slices.Contains(to.ExternalIPs, f.Addr):
				to.ExternalIPs = append(to.ExternalIPs, f.Addr)
			}
		}
	}
	if len(to.Endpoints) == 0 {
		return
	}
	of := "the " + endpointCount(all) + " in use"
	if all > len(to.Endpoints) {
		of = fmt.Sprintf("%d of the %d endpoints in use, which are those that were looked at", len(to.Endpoints), all)
	}
	w, err := c.reality.Ways(ctx, to)
	if err != nil {
		c.found(name, unknown, "%v", err)
		return
	}
	c.notForwarded(w.NotForwarded)
	for _, name := range w.NotForwardedBy {
		setting := "net.ipv4.conf." + name + ".forwarding"
		c.found("forwarding", problem, "%s is 0", setting)
		c.diagnose(problem, NotForwarded, "set "+setting+" to 1, and see what has cleared it",
			"This node does not forward what comes by %s (%s is 0): connections from there to endpoints elsewhere or in Pods fail, and so do others whose endpoints answer from there.", name, setting)
	}
	if n := len(w.Unreached); n > 0 {
		addrs, list := listed(w.Unreached, "%s (%s)")
		c.found(name, problem, "none to %d of %s", n, of)
		c.diagnose(problem, NoRoute, "see whether the network plugin runs on this node and on theirs, and whether it has left a route: ip route show table all match "+addrs[0].String(),
			"The kernel sends nothing to %d of %s, and connections that go there fail: %s.", n, of, some(list))
	} else if len(w.NotForwarded)+len(w.NotForwardedBy) == 0 {
		each := of
		if all > 1 {
			each = "each of " + of
		}
		c.found(name, ok, "there is one to %s", each)
	}
	c.unrouted(w.Unrouted)
	c.strayed(w)
	if n := len(w.Silent); n > 0 {
		addrs, list := listed(w.Silent, "%s (by %s)")
		c.found("next hops", problem, "that of %d of %s does not answer", n, of)
		c.diagnose(problem, NoNeighbour, "see whether the addresses are right, where the Pods are, whether two nodes have the same range (spec.podCIDR), and whether those nodes run: ip neigh show; ip route get "+addrs[0].String(),
			"Nobody in the network of this node answers for the next hop to %d of %s (ARP or neighbour discovery), and connections that go there fail: %s.", n, of, some(list))
		c.about(addrs...)
	}
	c.shut(w.Shut)
	c.misled(w)
	if len(w.Cut) > 0 {
		addrs, list := listed(w.Cut, "%s (%s)")
		c.found("route to the cluster IP", problem, "none: %s", some(list))
		c.diagnose(problem, NoRoute, "give this node a default route, or one to the range of cluster IPs; by which interface does not matter: ip route get "+addrs[0].String(),
			"What this node itself sends to the cluster IP fails before it meets any rule, since the kernel has no route there: %s. Pods have routes of their own.", some(list))
	}
	c.bridged(w.Bridged)
	if len(w.NoHairpin) > 0 && !c.masqueradeAll {
		addrs, list := listed(w.NoHairpin, "%s (port %s)")
		c.diagnose(note, NoHairpin, "set hairpinMode in the configuration of the network plugin (bridge); at once: ip link set "+w.NoHairpin[addrs[0]]+" type bridge_slave hairpin on",
			"A Pod can't reach itself by this Service, since hairpin mode is off at its bridge's port: %s. Connections of its own that are sent to it hang; those of others do not.", some(list))
	}
	if len(w.Unclaimed) > 0 {
		_, list := listed(w.Unclaimed, "%s (%s)")
		c.diagnose(note, Unclaimed, "give it to a node, or have something announce it or route it to one",
			"External IP in the network of an interface, but no address of this node: %s. nodeproxy announces none, so that clients of that network get there only if another node or program answers for it.", some(list))
	}
}

// shut is about endpoints for which IPsec lets nothing pass.
func (c *checks) shut(at map[netip.Addr]string) {
	if len(at) == 0 {
		return
	}
	_, list := listed(at, "%s (%s)")
	c.found("policies of IPsec", problem, "packets of %s are dropped", endpointCount(len(at)))
	c.diagnose(problem, ShutByIPsec, "see what manages IPsec on this node, and whether it has agreed on keys: ip xfrm policy; ip xfrm state",
		"A policy of IPsec has the kernel drop packets for endpoints, or their answers, and those connections fail: %s.", some(list))
}

// misled is about endpoints whose packets or answers take a way that is very likely a wrong one.
func (c *checks) misled(w *Ways) {
	local, outside := map[netip.Addr]bool{}, false
	for _, sp := range c.ports {
		outside = outside || sp.HasExternal()
		for _, ep := range sp.All() {
			local[ep.Addr.Addr()] = ep.Local
		}
	}
	here := map[netip.Addr]string{}
	for a, hop := range w.ByDefault {
		if local[a] {
			here[a] = hop
		}
	}
	if len(here) > 0 {
		addrs, list := listed(here, "%s (via %s)")
		c.found("default route", note, "it leads to %s of this node", endpointCount(len(here)))
		c.diagnose(note, LeavesNode, "see whether the network plugin's interface and its address are still there: ip addr; ip route get "+addrs[0].String(),
			"Endpoints are Pods of this node, but the node has no route to them but the default one, by which packets leave it; unless something there sends them back, connections fail: %s.", some(list))
	}
	if away := maps.Clone(w.ByDefault); len(away) > len(here) {
		maps.DeleteFunc(away, func(a netip.Addr, _ string) bool { return local[a] })
		addrs, list := listed(away, "%s (via %s)")
		c.suspect(NoRoute, "where nodes have routes to each other's Pods, see whether one is missing: ip route get "+addrs[0].String(),
			"Packets to endpoints on other nodes leave by the default route: %s.", some(list))
	}
	if len(w.Unserved) > 0 && slices.ContainsFunc(c.ports, func(sp *plan.ServicePort) bool {
		return slices.ContainsFunc(sp.Frontends, func(f plan.Frontend) bool { return f.Kind == plan.NodePort })
	}) {
		_, list := listed(w.Unserved, "%s (%s)")
		c.diagnose(note, NodePortsNowhere, "if clients use these, set nodePortAddresses to all or to their range, or correct the Node's InternalIP (--node-ip of the kubelet)",
			"Node ports do not answer at these addresses of this node, as nodePortAddresses limits them to others: %s.", some(list))
	}
	if fixed := maps.Clone(w.Fixed); len(fixed) > 0 {
		maps.DeleteFunc(fixed, func(a netip.Addr, _ string) bool { return local[a] })
		if addrs, list := listed(fixed, "%s (by %s)"); len(list) > 0 {
			c.suspect(WrongNeighbour, "compare it with that node's interface, and delete it if nothing needs it: ip neigh show; ip route get "+addrs[0].String(),
				"Somebody has made an entry of this node's neighbours (permanent) for the next hop to endpoints, so that the kernel asks nobody where it is; if that is not right any more, connections that go there fail: %s.", some(list))
		}
	}
	if len(w.Astray) > 0 && outside {
		addrs, list := listed(w.Astray, "%s (by %s)")
		say := c.suspect
		if !w.Marked { // Marks may have them go back where they came from.
			c.found("routes of answers", note, "those to clients outside leave by %s, not by %s", w.Astray[addrs[0]], w.Uplink)
			say = func(code, do, what string, args ...any) { c.diagnose(note, code, do, what, args...) }
		}
		say(AnswersAstray, fmt.Sprintf("see the rules for routing, and except what comes from endpoints: ip rule; ip route get 198.51.100.7 from %s iif INTERFACE", addrs[0]),
			"The answers of endpoints to clients outside leave by another interface than %s, to which the default route leads, as a rule for routing has it; if clients come by that, they most likely get no answer: %s.", w.Uplink, some(list))
	}
	if len(w.Looped) > 0 {
		_, list := listed(w.Looped, "%s (%s)")
		c.found("tunnels", problem, "one sends packets for %s to this node itself", endpointCount(len(w.Looped)))
		c.diagnose(problem, NoRoute, "see which address the other node has told the network plugin: two nodes with one InternalIP, as machines of Vagrant may have, need another interface for it (flannel: --iface; kubelet: --node-ip)",
			"A tunnel sends packets for endpoints on other nodes to an address of this node, and connections that go there fail: %s.", some(list))
	}
	if len(w.Lost) > 0 {
		_, list := listed(w.Lost, "%s (%s)")
		c.found("tunnels", problem, "one knows no host for %s", endpointCount(len(w.Lost)))
		c.diagnose(problem, NoRoute, "see whether the network plugin runs on this node and knows the other: bridge fdb show dev NAME",
			"A tunnel has no entry for the next hop to endpoints on other nodes, and connections that go there fail: %s.", some(list))
	}
	if len(w.Captive) > 0 {
		_, list := listed(w.Captive, "%s (%s)")
		c.found("networks of this node", problem, "one has the cluster IP: %s", some(list))
		c.diagnose(problem, Overlap, "give Services and Pods ranges that have no address in common (--service-cluster-ip-range, --cluster-cidr)",
			"The cluster IP is in the network of a bridge, so that Pods there look for it among themselves, and their connections fail: %s.", some(list))
	}
	if len(w.Overlaps) > 0 {
		severity := note
		if outside {
			severity = problem
		}
		c.found("networks of this node", severity, "some overlap: %s", some(w.Overlaps))
		c.diagnose(severity, Overlap, "give Pods a range that no host has: ip addr; ip route", "Networks of this node overlap, so that it looks for some hosts in the wrong one, and those can't reach the Service: %s.", some(w.Overlaps))
	}
	if w.Narrow != "" {
		c.diagnose(note, LongPackets, "set the MTU of Pods in the configuration of the network plugin to no more than that",
			"Pods send packets of up to %d bytes, and %s takes %d: what is longer gets through only if its sender learns that by ICMP errors.", w.PodMTU, w.Narrow, w.NarrowMTU)
	}
}

// strayed is about endpoints on other nodes that this node looks for in a network of its own: a bridge that has their range, mostly. It takes them
// from those whose next hop does not answer.
func (c *checks) strayed(w *Ways) {
	for _, sp := range c.ports {
		for _, ep := range sp.All() {
			a := ep.Addr.Addr()
			name, near := w.Near[a]
			if _, silent := w.Silent[a]; !near || !silent || ep.Local || c.nowhere[a] {
				continue
			}
			delete(w.Silent, a)
			c.found("next hops", problem, "%s does not answer at %s", a, name)
			c.diagnose(problem, NoNeighbour, fmt.Sprintf("if endpoints of other nodes are not to be reached by %s, give it another range, or remove it: ip addr show dev %s; ip route get %s", name, name, a),
				"Endpoint %s is on another node, but this node looks for it in the network of its own interface %s, where nobody answers for it, and connections that go there fail.", a, name)
		}
	}
}

// unrouted is about endpoints to which nothing is forwarded of what comes from elsewhere.
func (c *checks) unrouted(list []Unrouted) {
	if !slices.ContainsFunc(c.ports, (*plan.ServicePort).HasExternal) {
		list = slices.DeleteFunc(list, func(r Unrouted) bool { return r.From.Outside })
	}
	if !slices.ContainsFunc(c.ports, func(sp *plan.ServicePort) bool { return sp.ExternalPolicy == plan.Cluster }) { // Nothing is masqueraded.
		list = slices.DeleteFunc(list, func(r Unrouted) bool { return r.From.Mark != 0 })
	}
	for len(list) > 0 {
		first, addrs := list[0], []string(nil)
		list = slices.DeleteFunc(list, func(r Unrouted) bool {
			same := r.From == first.From && r.Why == first.Why
			if same {
				addrs = append(addrs, r.Addr.String())
			}
			return same
		})
		marked, command := "", fmt.Sprintf("ip rule; ip route get %s from %s iif %s", first.Addr, first.From.Addr, first.From.By)
		if first.From.Mark != 0 {
			marked = fmt.Sprintf(" and is marked to be masqueraded (%#x)", first.From.Mark)
			command += fmt.Sprintf(" mark %#x", first.From.Mark)
		}
		c.found("routes for others", problem, "none for what comes from %s by %s%s", first.From.Name, first.From.By, marked)
		c.diagnose(problem, NoRoute, "see the rules for routing: "+command,
			"This node has a route to the endpoints, but for what comes from %s by %s%s there is none that leads there (%s), as a rule for routing has it, and those connections hang: %s.",
			first.From.Name, first.From.By, marked, first.Why, some(addrs))
	}
}

// listed returns addresses in order, and each with what is said of it.
func listed(of map[netip.Addr]string, format string) (addrs []netip.Addr, words []string) {
	addrs = slices.SortedFunc(maps.Keys(of), netip.Addr.Compare)
	for _, a := range addrs {
		words = append(words, fmt.Sprintf(format, a, of[a]))
	}
	return addrs, words
}

func (c *checks) notForwarded(families []plan.Family) {
	for _, f := range families {
		setting := "net.ipv4.ip_forward"
		if f == plan.IPv6 {
			setting = "net.ipv6.conf.all.forwarding"
		}
		c.found("forwarding", problem, "%s is 0", setting)
		c.diagnose(problem, NotForwarded, "set "+setting+" to 1, and see what has cleared it: every node needs it, at every start",
			"This node does not forward packets of %s (%s is 0): of the connections to endpoints elsewhere, or from elsewhere to Pods, only its own get there.", f, setting)
	}
}

// bridged is about endpoints whose answers to Pods of the same bridge pass no rule, so that nothing translates them back.
func (c *checks) bridged(at map[netip.Addr]string) {
	here := map[netip.Addr]string{}
	for _, sp := range c.ports {
		for _, ep := range sp.All() {
			if name := at[ep.Addr.Addr()]; name != "" && ep.Local { // Of others, it is a bridge to other nodes.
				here[ep.Addr.Addr()] = name
			}
		}
	}
	if at = here; len(at) == 0 || c.masqueradeAll {
		return
	}
	addrs, list := listed(at, "%s (%s)")
	setting := "net.bridge.bridge-nf-call-iptables"
	if addrs[0].Is6() {
		setting = "net.bridge.bridge-nf-call-ip6tables"
	}
	c.found("bridges", problem, "%s is 0 or missing", setting)
	c.diagnose(problem, Bridged, "load the module br_netfilter, set "+setting+" to 1, and see that both happen at every start",
		"What goes from Pod to Pod within a bridge passes no rule (%s is 0, or the module br_netfilter is not loaded): a Pod that connects to the cluster IP, and gets an endpoint at its own bridge, gets answers from an address that it did not ask. Endpoints at a bridge: %s.",
		setting, some(list))
}

// reverse is about answers that the kernel does not take.
func (c *checks) reverse(ctx context.Context) {
	endpoints, _ := c.used(plan.IPv4)
	if c.reality.Reverse == nil || len(endpoints) == 0 {
		return
	}
	const name = "reverse path filter"
	r, err := c.reality.Reverse(ctx, endpoints)
	switch {
	case err != nil:
		c.found(name, unknown, "%v", err)
		return
	case len(r.Strict) == 0: // Then it does not matter for answers.
		if r.Known && r.Drops > 0 && len(r.Anywhere) > 0 && slices.ContainsFunc(c.ports, (*plan.ServicePort).HasExternal) {
			c.found(name, note, "strict at %s; %s dropped by it on this node", some(r.Anywhere), amount(int64(r.Drops), "packet"))
			c.diagnose(note, AnswersFiltered, fmt.Sprintf("if clients come there, have a route lead back to them, or set net.ipv4.conf.%s.rp_filter to 2, which is loose", r.Anywhere[0]),
				"The kernel has dropped %s on this node since rp_filter is strict at %s: clients that come by another interface than that of the route back to them get nowhere.",
				amount(int64(r.Drops), "packet"), some(r.Anywhere))
		}
		return
	}
	result, drops := ok, ""
	if r.Known {
		drops = fmt.Sprintf("; %s dropped by it on this node", amount(int64(r.Drops), "packet"))
		if r.Drops > 0 {
			result = note
			c.suspect(AnswersFiltered, fmt.Sprintf(toFilter, r.Strict[0]),
				"The kernel has dropped %s on this node since rp_filter is strict at %s: answers that come there although the route back to their source leads elsewhere are dropped.",
				amount(int64(r.Drops), "packet"), some(r.Strict))
		}
	}
	if len(r.Filtered) == 0 {
		c.found(name, result, "strict at %s, by which the routes back to the endpoints lead%s", some(r.Strict), drops)
		return
	}
	c.found(name, problem, "strict at %s, by which the routes back to %d of the endpoints do not lead%s", some(r.Strict), len(r.Filtered), drops)
	for _, f := range r.Filtered[:min(len(r.Filtered), mostFiltered)] {
		c.diagnose(problem, AnswersFiltered, fmt.Sprintf(toFilter, f.By), "%s.", f)
	}
}

const (
	mostAddresses = 32 // endpoints of a family to which the ways are looked at
	mostFiltered  = 3  // of those whose answers are dropped, are named
)

// StaleAfter is the age from which what is known counts as out of date, as in /readyz.
const StaleAfter = 5 * time.Minute

// watches is about the connection to the API server.
func (c *checks) watches(context.Context) {
	if c.reality.Watches == nil {
		return
	}
	const name = "API server"
	var oldest *source.Watch
	for _, w := range c.reality.Watches() {
		if oldest == nil || w.Age > oldest.Age {
			oldest = &w
		}
	}
	if oldest == nil {
		return
	}
	age, why := duration.HumanDuration(oldest.Age), ""
	if oldest.Failure != "" {
		why = ": " + oldest.Failure
	}
	switch {
	case oldest.Age >= StaleAfter:
		c.found(name, problem, "silent for %s about %s%s", age, oldest.Resource, why)
		c.diagnose(problem, APIServerAway, "see whether the API server runs and can be reached from this node; what was known last stays in force until then",
			"The API server has sent nothing about %s for %s, so what this node knows may be out of date%s.", oldest.Resource, age, why)
	case oldest.Failure != "":
		c.found(name, note, "heard %s ago%s", age, why)
		c.diagnose(note, APIServerAway, "see whether the API server runs and can be reached from this node",
			"The API server does not answer now, and was heard %s ago%s.", age, why)
	default:
		c.found(name, ok, "heard %s ago", age)
	}
}

// Counters are what has gone through a ServicePort since its rules were written, over all its frontends: in to its endpoints and out from
// them. What the mode does not count is -1.
type Counters struct {
	Connections int64 `json:"connections"`
	PacketsIn   int64 `json:"packetsIn"`
	PacketsOut  int64 `json:"packetsOut"`
	BytesIn     int64 `json:"bytesIn"`
	BytesOut    int64 `json:"bytesOut"`
}

// CountedServicePorts is ServicePorts with Counters, where there are any and they can be read in time.
func (n *Node) CountedServicePorts(ctx context.Context, of plan.Service) []ServicePort {
	list := n.ServicePorts(of)
	if n.Reality == nil || n.Reality.Traffic == nil {
		return list
	}
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	all, err := n.Reality.Traffic(ctx)
	if err != nil {
		return list
	}
	for k, t := range all {
		i, found := slices.BinarySearchFunc(list, k, func(sp ServicePort, k plan.Key) int { return sp.key().Compare(k) })
		if found {
			list[i].Counters = &Counters{t.Connections, t.PacketsIn, t.PacketsOut, t.BytesIn, t.BytesOut}
		}
	}
	return list
}

// key is the key of the ServicePort.
func (sp *ServicePort) key() plan.Key {
	k := plan.Key{Service: plan.Service{Namespace: sp.Namespace, Name: sp.Name}, Port: sp.Port, Protocol: sp.Protocol, Family: plan.IPv4}
	if sp.Family == plan.IPv6.String() {
		k.Family = plan.IPv6
	}
	return k
}

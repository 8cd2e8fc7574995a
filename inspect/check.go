package inspect

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
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
	Blocking func(ctx context.Context, ports []*plan.ServicePort) (list []reality.Blocking, within bool, err error)
	// Endpoints returns what is known of listeners at the endpoints of ServicePorts that are on this node; nothing of those where that can't be known.
	Endpoints func(ctx context.Context, ports []*plan.ServicePort) ([]reality.Listening, error)
	// Reverse returns what the kernel does with the answers of endpoints for the interfaces by which they come.
	Reverse func(ctx context.Context, endpoints []netip.Addr) (*reality.Reverse, error)
	// Ways returns what the kernel does with packets to addresses of a Service.
	Ways func(ctx context.Context, to reality.Places) (*reality.Ways, error)
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

// check is one thing to look at. If it applies, look says what it finds, under its name; its error is why it could find out nothing.
type check struct {
	name    string
	applies bool
	look    func(*checks, context.Context) error
}

// checks returns what can be looked at, in the order in which it is told: some of it for a Service that is proxied alone.
func (r *Reality) checks(service bool) []check {
	return []check{
		{"rules in the kernel", r.Kernel != nil && service, (*checks).kernel},
		{"changes by other programs", r.Changed != nil, (*checks).changed},
		{"traffic", r.Traffic != nil && service, (*checks).traffic},
		{"connections", r.Flows != nil && service, (*checks).flows},
		{"connection tracking", r.Tracked != nil, (*checks).tracked},
		{"listeners on the node", r.Listeners != nil && service, (*checks).listeners},
		{"rules of other programs", r.Blocking != nil && service, (*checks).blocking},
		{"listeners at endpoints", r.Endpoints != nil && service, (*checks).endpoints},
		{"routes to endpoints", r.Ways != nil && service, (*checks).ways},
		{"reverse path filter", r.Reverse != nil && service, (*checks).reverse},
		{"API server", r.Watches != nil, (*checks).watches},
	}
}

// Check looks at the node, and adds what it finds to an explanation that Explain has returned.
func (n *Node) Check(ctx context.Context, e *Explanation) {
	if n.Reality == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	c := checks{reality: n.Reality, svc: plan.Service{Namespace: e.Namespace, Name: e.Name}, ports: e.described.ServicePorts,
		frontends: e.described.Frontends, nowhere: map[netip.Addr]bool{}, masqueradeAll: e.masqueradeAll, now: time.Now()}
	for _, sp := range c.ports {
		for _, ep := range e.described.Endpoints(sp.Key) {
			c.nowhere[ep.Addr.Addr()] = ep.Node == ""
		}
	}
	all := n.Reality.checks(len(c.ports) > 0)
	each := make([]checks, len(all))
	var wg sync.WaitGroup
	for i, check := range all {
		if !check.applies {
			continue
		}
		one := &each[i]
		*one = c
		one.name = check.name
		wg.Go(func() {
			defer one.survive()
			if err := check.look(one, ctx); err != nil {
				one.found(unknown, "%v", err)
			}
		})
	}
	wg.Wait()
	for _, one := range each {
		e.Checks = append(e.Checks, one.list...)
		e.Diagnoses = append(e.Diagnoses, one.diagnoses...)
	}
	weigh(e)
}

// The severities of diagnoses while they are weighed.
const (
	// suspected is what is said where connections have no answer and nothing else says why. It comes last.
	suspected = "if unanswered"
	// explained is what follows from something else, and is not said.
	explained = "explained"
)

// weigh gives diagnoses their weight beside others: what may be means more where connections have no answer, and what follows from something else is not
// said. The worst come first.
func weigh(e *Explanation) {
	of := func(code string) (out []*Diagnosis) {
		for i := range e.Diagnoses {
			if d := &e.Diagnoses[i]; d.Code == code && d.Severity != suspected && d.Severity != explained {
				out = append(out, d)
			}
		}
		return out
	}
	is := func(code, severity string) bool {
		return slices.ContainsFunc(of(code), func(d *Diagnosis) bool { return d.Severity == severity })
	}
	set := func(severity string, codes ...string) {
		for _, code := range codes {
			for _, d := range of(code) {
				d.Severity = severity
			}
		}
	}
	if long, dropped := of(LongPackets), of(ICMPDropped); len(long) > 0 && len(dropped) > 0 {
		long[0].Severity, dropped[0].Severity = problem, problem
	}
	if is(Unanswered, problem) {
		set(problem, LeavesNode, AnswersAstray)
	}
	if is(Untracked, note) { // A program of this node is meant to answer there.
		set(note, PortConflict)
	}
	connected := of(StaleConnections)
	for _, d := range of(Diverted) { // By the connections, the rule does decide.
		for _, stale := range connected {
			if d.Do == byLeftovers && slices.ContainsFunc(d.about, func(a netip.Addr) bool { return slices.Contains(stale.about, a) }) {
				d.Severity, stale.Severity = problem, explained
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
			silent.Severity = explained
		}
	}
	for _, d := range of(ICMPDropped) {
		if d.Severity != problem {
			d.Severity = explained
		}
	}
	if slices.ContainsFunc(e.Diagnoses, func(d Diagnosis) bool { return d.Severity == problem && causes[d.Code] }) { // It says why.
		set(explained, Unanswered)
	}
	silent := is(Unanswered, problem)
	e.Diagnoses = slices.DeleteFunc(e.Diagnoses, func(d Diagnosis) bool { return d.Severity == explained || d.Severity == suspected && !silent })
	worstFirst(e.Diagnoses)
	for i := range e.Diagnoses {
		if e.Diagnoses[i].Severity == suspected {
			e.Diagnoses[i].Severity = note
		}
	}
}

// causes are the codes of what has connections without an answer.
var causes = map[string]bool{
	DroppedByOthers: true, Untracked: true, Unmasqueraded: true, Diverted: true, NoRoute: true, NoNeighbour: true, NotForwarded: true, Bridged: true,
	AnswersFiltered: true, EndpointStuck: true, EndpointIsService: true, PodGone: true, SharedAddress: true, Detached: true, DifferentMTU: true, WrongNeighbour: true, AnswersAstray: true, LeavesNode: true, ShutByIPsec: true,
}

// checks collects what one check finds about one Service.
type checks struct {
	name    string // of the check
	reality *Reality
	svc     plan.Service
	ports   []*plan.ServicePort
	// frontends are endpoints that are frontends of Services, of which there is a diagnosis already.
	frontends map[netip.AddrPort]proxier.Owned
	// nowhere are the endpoints of which no node is named.
	nowhere map[netip.Addr]bool
	// masqueradeAll is true if endpoints answer to this node in any case.
	masqueradeAll bool
	now           time.Time
	list          []Check
	diagnoses     []Diagnosis
}

// survive must be deferred: a check reads what other programs have written, and a fault in that must not end the proxy.
func (c *checks) survive() {
	if fault := recover(); fault != nil {
		c.foundIn("checks", unknown, "one of them failed: %v", fault)
	}
}

func (c *checks) found(result, format string, args ...any) {
	c.foundIn(c.name, result, format, args...)
}

func (c *checks) foundIn(name, result, format string, args ...any) {
	c.list = append(c.list, Check{name, result, fmt.Sprintf(format, args...)})
}

func (c *checks) diagnose(severity, code, do, what string, args ...any) {
	c.diagnoses = append(c.diagnoses, Diagnosis{Severity: severity, Code: code, What: fmt.Sprintf(what, args...), Do: do})
}

// about says which addresses the last diagnosis is about.
func (c *checks) about(list ...netip.Addr) { c.diagnoses[len(c.diagnoses)-1].about = list }

// any reports whether a ServicePort of the Service is such a one.
func (c *checks) any(is func(*plan.ServicePort) bool) bool { return slices.ContainsFunc(c.ports, is) }

// ago is such as "3s ago".
func (c *checks) ago(t time.Time) string { return duration.HumanDuration(c.now.Sub(t)) + " ago" }

// kernel is about what the kernel holds.
func (c *checks) kernel(ctx context.Context) error {
	things, differ, err := c.reality.Kernel(ctx, c.svc)
	switch {
	case err != nil:
		return err
	case len(differ) > 0:
		c.found(problem, "%d of %d are not as written: %s", len(differ), things, some(differ))
		c.diagnose(problem, NotInKernel, "wait a moment, as nodeproxy writes them again; if it stays so, its log says why it can't",
			"The kernel does not hold what was programmed: another program has changed it (%s).", some(differ))
	default:
		c.found(ok, "all %d are as written", things)
	}
	return nil
}

// changed is about what other programs changed lately.
func (c *checks) changed(context.Context) error {
	list := c.reality.Changed()
	if len(list) == 0 {
		return nil
	}
	last := list[len(list)-1]
	severity, state := note, "nodeproxy has written it again"
	if !last.Repaired {
		severity, state = problem, "nodeproxy could not write it again yet"
	}
	times := when(len(list) > 1, fmt.Sprintf(", the last of %d times within %s", len(list), duration.HumanDuration(c.now.Sub(list[0].When))))
	if len(list) >= 3 {
		severity = problem
	}
	c.found(severity, "%s%s: %s", c.ago(last.When), times, last.What)
	c.diagnose(severity, ChangedByOthers, "find the program that does this, if connections failed then",
		"Another program changed what nodeproxy had programmed, %s%s, and %s: %s.", c.ago(last.When), times, state, last.What)
	return nil
}

// StaleAfter is the age from which what is known counts as out of date, as in /readyz.
const StaleAfter = 5 * time.Minute

// watches is about the connection to the API server.
func (c *checks) watches(context.Context) error {
	list := c.reality.Watches()
	if len(list) == 0 {
		return nil
	}
	oldest := slices.MaxFunc(list, func(a, b source.Watch) int { return cmp.Compare(a.Age, b.Age) })
	age, why := duration.HumanDuration(oldest.Age), with(": ", oldest.Failure)
	switch {
	case oldest.Age >= StaleAfter:
		c.found(problem, "silent for %s about %s%s", age, oldest.Resource, why)
		c.diagnose(problem, APIServerAway, "see whether the API server runs and can be reached from this node; what was known last stays in force until then",
			"The API server has sent nothing about %s for %s, so what this node knows may be out of date%s.", oldest.Resource, age, why)
	case oldest.Failure != "":
		c.found(note, "heard %s ago%s", age, why)
		c.diagnose(note, APIServerAway, "see whether the API server runs and can be reached from this node",
			"The API server does not answer now, and was heard %s ago%s.", age, why)
	default:
		c.found(ok, "heard %s ago", age)
	}
	return nil
}

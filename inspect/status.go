package inspect

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"nodeproxy/inspect/reality"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// Self is what a running nodeproxy knows of itself.
type Self struct {
	Program  string // with its version
	Variant  string // of the mode, such as the variant of iptables; "" if it has none
	Families []plan.Family
	// Unserved are the families of the host that the mode does not program.
	Unserved []plan.Family
	Started  time.Time
	// From names the source of objects. Watches say how current they are; nil if they can't become stale, as with files.
	From    string
	Watches []source.Watch
	// Missing are the conditions for readiness that are not met, as at /readyz.
	Missing []Missing
	// Neighbours are other programs that affect this one.
	Neighbours []Neighbour
	// Rejected is why the configuration file is not in force; "" if it is.
	Rejected string
	// Waited is for how long the oldest change has waited that is not programmed yet; 0 for none.
	Waited time.Duration
}

// Missing is a condition for readiness that is not met.
type Missing struct {
	Condition string `json:"condition"`
	Detail    string `json:"detail"`
}

// Neighbour is another program, or what one has done or left.
type Neighbour struct {
	// Kind is one of proxy, change, leftovers and DaemonSet.
	Kind string `json:"kind"`
	What string `json:"what"`
	// Problem is true if somebody has to do something about it.
	Problem bool `json:"problem"`
}

// DaemonSet is the kind of neighbour that is a finding, too.
const DaemonSet = "daemonset"

// Status is how a running nodeproxy fares.
type Status struct {
	Program  string    `json:"program"`
	Node     string    `json:"node"`
	Mode     string    `json:"mode"`
	Variant  string    `json:"variant,omitempty"`
	Families []string  `json:"families"`
	Unserved []string  `json:"unservedFamilies,omitempty"`
	Started  time.Time `json:"started"`
	Now      time.Time `json:"now"`
	Ready    bool      `json:"ready"`
	Missing  []Missing `json:"missing"`
	// InSync is true if the kernel has everything that the objects ask for; then InSyncSince is when it first had, after the start or the
	// last failure. Syncs that follow changes within the usual time don't interrupt it.
	InSync      bool      `json:"inSync"`
	InSyncSince time.Time `json:"inSyncSince,omitzero"`
	// WaitingSeconds is for how long the oldest change has waited that is not programmed yet.
	WaitingSeconds float64        `json:"waitingSeconds,omitempty"`
	Services       int            `json:"services"`
	ServicePorts   int            `json:"servicePorts"`
	Endpoints      int            `json:"endpoints"` // addresses and ports that are in use
	Problems       int            `json:"problems"`
	Notes          int            `json:"notes"`
	Refused        []string       `json:"refused"` // ServicePorts
	Neighbours     []Neighbour    `json:"neighbours"`
	Syncs          SyncStatistics `json:"syncs"`
	Source         SourceStatus   `json:"source"`
	// Verification is nil unless it was asked for.
	Verification *source.Verification `json:"verification,omitempty"`
	// Tracked is nil where it can't be read.
	Tracked  *TrackedFlows `json:"tracked,omitempty"`
	filtered []reality.Filtered
	// notForwarded are the families of which this node forwards nothing, though endpoints are elsewhere.
	notForwarded []plan.Family
	// refusing are endpoints on this node that get traffic and at which nothing listens, each with a Service.
	refusing []string
	// Wrong says what is wrong, a sentence each, with what to do; empty if nothing is.
	Wrong []string `json:"wrong"`
}

// SyncStatistics are about the syncs that are still known and that changed anything. Durations are in seconds, without the wait.
type SyncStatistics struct {
	Known   int       `json:"known"`
	Since   time.Time `json:"since,omitzero"`
	Failed  int       `json:"failed"`
	Median  float64   `json:"medianSeconds"`
	P99     float64   `json:"p99Seconds"`
	Last    time.Time `json:"last,omitzero"` // of any sync, when it began
	LastFor float64   `json:"lastSeconds"`
	LastWhy string    `json:"lastReason"`
	// LastError is the text with which the last sync failed; "" if it did not.
	LastError string `json:"lastError,omitempty"`
}

// TrackedFlows are the flows that the kernel tracks, of all programs.
type TrackedFlows struct {
	Flows int `json:"flows"`
	// Most is how many it tracks at most. The first packet of any more may be dropped.
	Most int `json:"most"`
	// Forgets is after how many seconds of silence it forgets an established connection of TCP; 0 if that is not known, or as nodeproxy has set it.
	Forgets int `json:"-"`
}

func (t TrackedFlows) full() bool { return t.Most > 0 && t.Flows >= t.Most }

// SourceStatus says how current the objects are.
type SourceStatus struct {
	From string `json:"from"`
	// Connected is false while something from the API server fails or has been silent for too long; always true for files.
	Connected bool `json:"connected"`
	// LastEvent is when the API server last sent anything, and AwaySince the same for the resource for which it is longest ago, if that is not
	// connected.
	LastEvent time.Time `json:"lastEvent,omitzero"`
	AwaySince time.Time `json:"awaySince,omitzero"`
	Failures  []string  `json:"failures,omitempty"`
}

// Status returns how this nodeproxy fares. What takes long is left out once ctx has ended.
func (n *Node) Status(ctx context.Context) *Status {
	self, now := n.Self(), time.Now()
	s := &Status{Program: self.Program, Mode: n.Mode, Variant: self.Variant,
		Families: words(self.Families, plan.Family.String), Unserved: words(self.Unserved, plan.Family.String),
		Started: self.Started, Now: now, Missing: append([]Missing{}, self.Missing...), Ready: len(self.Missing) == 0,
		Neighbours: append([]Neighbour{}, self.Neighbours...), Refused: []string{}, Wrong: []string{}, WaitingSeconds: self.Waited.Seconds()}
	n.View(func(state *proxier.State) {
		s.Node, s.ServicePorts = state.Plan().Node.Name, len(state.Plan().Services)
	})
	snapshot, seen := n.snapshot(), map[netip.AddrPort]struct{}{}
	for _, ports := range snapshot.Services() {
		s.Services++
		for _, sp := range ports {
			for _, ep := range sp.All() {
				seen[ep.Addr] = struct{}{}
			}
		}
	}
	s.Endpoints = len(seen)
	for _, f := range n.AllFindings() {
		if f.Severity == problem {
			s.Problems++
		} else {
			s.Notes++
		}
	}
	for k := range n.refused() {
		s.Refused = append(s.Refused, k.String())
	}
	slices.Sort(s.Refused)
	s.InSyncSince = n.History.inSyncSince()
	s.InSync = !s.InSyncSince.IsZero()
	s.Syncs = statistics(n.History.Syncs())
	s.Source = sourceStatus(self, now)
	if r := n.Reality; r != nil {
		if snapshot != nil {
			s.filtered, s.notForwarded = r.sampled(ctx, snapshot)
		}
		if snapshot != nil && r.Endpoints != nil {
			s.refusing = r.refusing(ctx, snapshot)
		}
		if r.Tracked != nil {
			if t, err := r.Tracked(); err == nil {
				s.Tracked = &t
			}
		}
	}
	s.judge(self)
	return s
}

// sampled looks at the ways to one endpoint of IPv4 in each range of 256 addresses, which have the same route nearly everywhere, and to one of IPv6. It
// returns those whose answers the kernel drops, and the families of which this node forwards nothing.
func (r *Reality) sampled(ctx context.Context, snapshot *plan.Snapshot) (filtered []reality.Filtered, notForwarded []plan.Family) {
	first := map[netip.Prefix]netip.Addr{}
	for _, ports := range snapshot.Services() {
		for _, sp := range ports {
			for _, ep := range sp.All() {
				a := ep.Addr.Addr()
				bits := 0
				if a.Is4() {
					bits = 24
				}
				within := netip.PrefixFrom(a, bits).Masked()
				if known, is := first[within]; !is || a.Less(known) {
					first[within] = a
				}
			}
		}
	}
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	all := slices.SortedFunc(maps.Values(first), netip.Addr.Compare)
	sample := only(all, netip.Addr.Is4)
	sample = sample[:min(len(sample), mostAddresses)]
	if r.Reverse != nil {
		if back, err := r.Reverse(ctx, sample); err == nil { // Else explain says it.
			filtered = back.Filtered
		}
	}
	if r.Ways != nil {
		sample = append(sample, only(all, netip.Addr.Is6)...)
		if w, err := r.Ways(ctx, reality.Places{Endpoints: sample}); err == nil {
			notForwarded = w.NotForwarded
		}
	}
	return filtered, notForwarded
}

// refusing returns the endpoints on this node at which nothing listens, of as many as are looked at.
func (r *Reality) refusing(ctx context.Context, snapshot *plan.Snapshot) (out []string) {
	var ports []*plan.ServicePort
	for _, list := range snapshot.Services() {
		for _, sp := range list {
			if here := only(sp.All(), func(ep plan.Endpoint) bool { return ep.Local }); len(here) > 0 {
				ports = append(ports, &plan.ServicePort{Key: sp.Key, Endpoints: plan.Endpoints{Cluster: here}})
			}
		}
	}
	slices.SortFunc(ports, func(a, b *plan.ServicePort) int { return a.Key.Compare(b.Key) })
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	list, err := r.Endpoints(ctx, ports)
	if err != nil { // explain says it.
		return nil
	}
	list = slices.DeleteFunc(list, func(l reality.Listening) bool {
		return l.Listens || l.Loopback || l.Several || l.Attachment != (reality.Attachment{}) || isFrontend(snapshot, l.Addr)
	})
	for _, l := range list {
		for _, sp := range ports {
			if sp.Key.Protocol == l.Protocol && slices.ContainsFunc(sp.All(), func(ep plan.Endpoint) bool { return ep.Addr == l.Addr }) {
				out = append(out, fmt.Sprintf("%s of Service %s", l.Addr, sp.Key.Service))
				break
			}
		}
	}
	return out
}

// isFrontend reports whether a Service answers at an address and port, or at a node port of this number.
func isFrontend(snapshot *plan.Snapshot, at netip.AddrPort) bool {
	for _, ports := range snapshot.Services() {
		for _, sp := range ports {
			if slices.ContainsFunc(sp.Frontends, func(f plan.Frontend) bool { return f.Port == at.Port() && (f.Addr == at.Addr() || !f.Addr.IsValid()) }) {
				return true
			}
		}
	}
	return false
}

func statistics(list []Sync) SyncStatistics {
	var out SyncStatistics
	var took []float64
	for _, s := range list {
		if len(s.Services) == 0 && s.Error == "" {
			continue
		}
		if out.Known++; out.Since.IsZero() {
			out.Since = s.Began
		}
		if s.Error != "" {
			out.Failed++
		}
		took = append(took, s.Took.Total())
	}
	if len(took) > 0 {
		slices.Sort(took)
		out.Median, out.P99 = took[(len(took)-1)/2], took[(len(took)-1)*99/100]
	}
	if len(list) > 0 {
		last := list[len(list)-1]
		out.Last, out.LastFor, out.LastWhy, out.LastError = last.latest(), last.Took.Total(), last.why(), last.Error
	}
	return out
}

func sourceStatus(self Self, now time.Time) SourceStatus {
	s := SourceStatus{From: self.From, Connected: true}
	for _, w := range self.Watches {
		if w.Age >= 0 {
			if at := now.Add(-w.Age); at.After(s.LastEvent) {
				s.LastEvent = at
			}
		}
		if w.Failure == "" && w.Age < StaleAfter {
			continue
		}
		s.Connected = false
		if w.Failure != "" {
			s.Failures = append(s.Failures, w.Resource+": "+w.Failure)
		}
		if at := now.Add(-w.Age); w.Age >= 0 && (s.AwaySince.IsZero() || at.Before(s.AwaySince)) {
			s.AwaySince = at
		}
	}
	return s
}

// judge finds what is wrong.
func (s *Status) judge(self Self) {
	wrong := func(form string, args ...any) { s.Wrong = append(s.Wrong, fmt.Sprintf(form, args...)) }
	var stale []string
	for _, m := range s.Missing {
		if m.Condition == "fresh" { // One for each kind of object, all for the same cause as a rule.
			stale = append(stale, m.Detail)
		} else {
			wrong("It is not ready (%s): %s.", m.Condition, m.Detail)
		}
	}
	if len(stale) > 0 {
		others := len(stale) - 1
		more := when(others > 0, fmt.Sprintf("; nor is it for %d more %s of objects", others, plural(others, "kind")))
		wrong("It is not ready (fresh): %s%s. Look at the API server, and at this node's way to it.", stale[0], more)
	}
	if s.Syncs.LastError != "" {
		wrong("The last sync failed, and is tried again: %s. \"nodeproxy history\" has the syncs before.", s.Syncs.LastError)
	}
	if s.Ready && !s.Source.Connected {
		away := with(" for ", since(s.Source.AwaySince, s.Now))
		wrong("Nothing has come from %s%s, so that changes of Services are not known; what was known last stays in force (%s). Look at the API "+
			"server, and at this node's way to it.", s.Source.From, away, cmp.Or(strings.Join(s.Source.Failures, "; "), "no error"))
	}
	if len(s.Unserved) > 0 {
		wrong("Services of %s are not proxied: the log says at the start of nodeproxy what this node lacks.", strings.Join(s.Unserved, " and "))
	}
	said := len(s.Refused)
	for _, neighbour := range s.Neighbours {
		if neighbour.Problem {
			wrong("%s.", neighbour.What)
		}
		if neighbour.Kind == DaemonSet {
			said++
		}
	}
	if self.Rejected != "" {
		said++
		wrong("The configuration file is not used, and the former configuration stays in force: %s.", self.Rejected)
	}
	if t := s.Tracked; t != nil && t.full() {
		wrong("The kernel may drop new connections of any kind: it tracks %d flows, and no more than %d. To do: %s.", t.Flows, t.Most, moreFlows)
	}
	for _, f := range s.filtered[:min(len(s.filtered), mostFiltered)] {
		wrong("%s. To do: %s.", f, fmt.Sprintf(toFilter, f.By))
	}
	for _, f := range s.notForwarded {
		what, do := notForwarding(f)
		wrong("%s To do: %s.", what, do)
	}
	if n := len(s.refusing); n > 0 {
		wrong("Nothing listens at %s of this node, which %s traffic all the same: %s. \"nodeproxy explain\" says more.", counted(n, "endpoint"),
			either(n == 1, "gets", "get"), some(s.refusing))
	}
	if n := len(s.Refused); n > 0 {
		wrong("The kernel refuses %s: %s. \"nodeproxy explain\" says why.", counted(n, "ServicePort"), some(s.Refused))
	}
	if more := s.Problems - said; more > 0 {
		wrong("There %s with objects or with the node; \"nodeproxy get findings\" lists them.",
			either(more == 1, "is a problem", fmt.Sprintf("are %d problems", more)))
	}
}

// WriteStatus writes a status on one screen.
func WriteStatus(w io.Writer, s *Status) error {
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	row := func(name string, parts ...string) {
		fmt.Fprintf(t, "%s\t%s\n", name, Printable(joined(", ", parts...)))
	}
	mode := s.Mode + when(s.Variant != "", " ("+s.Variant+")")
	row("Program", s.Program, "up for "+since(s.Started, s.Now))
	row("Node", s.Node)
	row("Mode", mode, strings.Join(s.Families, " and "))
	ready := "yes"
	if !s.Ready {
		names := slices.Compact(words(s.Missing, func(m Missing) string { return m.Condition }))
		ready = "no: " + strings.Join(names, ", ") + " missing"
	}
	row("Ready", ready)
	row("In sync", either(s.InSync, "for "+since(s.InSyncSince, s.Now), "no"), with("a change has waited for ", seconds(s.WaitingSeconds)))
	row("Objects", counted(s.Services, "Service"), counted(s.ServicePorts, "ServicePort"), counted(s.Endpoints, "endpoint")+" in use")
	source := "current"
	switch {
	case s.Source.LastEvent.IsZero() && s.Source.Connected:
	case s.Source.Connected:
		source = "connected, last event " + since(s.Source.LastEvent, s.Now) + " ago"
	case s.Source.AwaySince.IsZero():
		source = "never connected"
	default:
		source = "away for " + since(s.Source.AwaySince, s.Now)
	}
	row("Source", s.Source.From, source)
	if s.Syncs.Known > 0 {
		failed := when(s.Syncs.Failed > 0, fmt.Sprintf("%d failed", s.Syncs.Failed))
		row("Syncs", fmt.Sprintf("%d of the last %s changed something", s.Syncs.Known, since(s.Syncs.Since, s.Now)), "median "+seconds(s.Syncs.Median),
			"99 % within "+seconds(s.Syncs.P99), failed)
	}
	if !s.Syncs.Last.IsZero() {
		row("Last sync", since(s.Syncs.Last, s.Now)+" ago", "took "+seconds(s.Syncs.LastFor), "why: "+s.Syncs.LastWhy)
	}
	if s.Tracked != nil {
		row("Tracking", fmt.Sprintf("%d of at most %d flows", s.Tracked.Flows, s.Tracked.Most))
	}
	row("Findings", counted(s.Problems, "problem"), counted(s.Notes, "note"))
	row("Refused", cmp.Or(some(s.Refused), "none"))
	name := "Neighbours"
	for _, n := range s.Neighbours {
		row(name, n.What)
		name = ""
	}
	if len(s.Neighbours) == 0 {
		row("Neighbours", "none seen")
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if s.Verification != nil {
		writeVerification(w, *s.Verification, s.Now)
	}
	if len(s.Wrong) == 0 {
		fmt.Fprint(w, "\nNothing is wrong.\n")
	}
	writeList(w, "What is wrong", s.Wrong)
	return nil
}

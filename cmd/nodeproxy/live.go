package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"nodeproxy/inspect"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/nft"
	"nodeproxy/kernel/tracer"
	"nodeproxy/kernel/xtables"
	"nodeproxy/node/endpoints"
	"nodeproxy/plan"
)

// liveTrace has the flags of trace that concern real packets.
type liveTrace struct {
	on       bool
	duration time.Duration
	most     int
}

// check returns an error for flags that make no sense.
func (l liveTrace) check(given func(string) bool) error {
	switch {
	case !l.on && (given("for") || given("max-packets")):
		return &usageError{errors.New("--for and --max-packets are for --live")}
	case l.on && l.duration <= 0:
		return &usageError{fmt.Errorf("--for: %v is no time to wait", l.duration)}
	case l.on && l.most <= 0:
		return &usageError{fmt.Errorf("--max-packets: %d is not above 0", l.most)}
	}
	return nil
}

// follow follows real packets of the flow that was traced, and compares each with the prediction for its source.
func (l liveTrace) follow(ctx context.Context, predicted *inspect.Trace, from answers) (*inspect.Live, error) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, l.duration)
	defer cancel()
	tracers := make([]*tracer.Tracer, 0, len(predicted.Packets))
	defer func() {
		for _, t := range tracers {
			_ = t.Close() // What it leaves goes with the process.
		}
	}()
	for _, p := range predicted.Packets {
		if predicted.Mode == ipvsMode.name && p.FromNode { // The kernel numbers it anew, the second time.
			return nil, &usageError{errors.New("--live can't follow what the node itself sends in mode ipvs, which passes the rules twice: use FROM=outside or a Pod")}
		}
		f, err := flowOf(p)
		if err != nil {
			return nil, err
		}
		t, err := tracer.Start(f)
		if errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("--live needs the capability CAP_NET_ADMIN to follow packets: run it as root (%w)", err)
		}
		if err != nil {
			return nil, fmt.Errorf("--live: %w", err)
		}
		tracers = append(tracers, t)
	}
	begin := time.Now()
	results, errs := make([]*tracer.Result, len(tracers)), make([]error, len(tracers))
	var all sync.WaitGroup
	for i, t := range tracers {
		all.Go(func() { results[i], errs[i] = t.Follow(ctx, l.most) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("--live: %w", err)
	}
	out := &inspect.Live{Trace: predicted, Duration: time.Since(begin).Round(100 * time.Millisecond).Seconds(), Seen: []inspect.SeenPacket{}}
	if rules, err := nft.ReadRuleset(); err == nil { // It is only a hint.
		for _, c := range rules.Devices {
			out.Notes = append(out.Notes, fmt.Sprintf("A device calls %s, before or behind all that is followed here: what that drops does not show.", c))
		}
		rules.Close()
	}
	for i, r := range results {
		out.Passed += r.Passed
		legacy := ""
		if f := tracers[i].Family(); len(xtables.LegacyTables(f)) > 0 {
			legacy = xtables.BaseName(f) + "-legacy"
			out.Notes = append(out.Notes, fmt.Sprintf("There are rules of %s on this node, which the kernel does not tell of: they are missing above. "+
				"Where packets get to is known all the same.", legacy))
		}
		if r.Lost {
			out.Notes = append(out.Notes, "The kernel had more to tell than could be read, so that rules may be missing.")
		}
		bridges := bridgesOf(tracers[i].Family())
		for _, p := range r.Packets {
			s := seen(p)
			s.Unfollowed, s.Bridge = legacy, bridges[s.In]
			if a := s.Answer; a != nil && a.Action == inspect.Lost && bridges[a.In] != "" { // The kernel tells no more of it.
				s.Answer = nil
			}
			s.Compare(predictionFor(context.WithoutCancel(ctx), &predicted.Packets[i], p.Src.Addr(), from))
			out.Seen = append(out.Seen, s)
		}
	}
	return out, nil
}

// bridgesOf returns the bridges whose packets pass rules as those of ports (br_netfilter), by their own names and those of their ports.
func bridgesOf(f plan.Family) map[string]string {
	links, err := host.Links()
	if err != nil { // It is only a hint.
		return nil
	}
	out := map[string]string{}
	for _, l := range links {
		bridge := l
		if l.Kind != "bridge" {
			bridge = links[l.Master]
		}
		if bridge.Kind == "bridge" && endpoints.BridgeFiltered("/proc/sys", bridge.Name, f) {
			out[l.Name] = bridge.Name
		}
	}
	return out
}

// flowOf returns the flow of a predicted packet.
func flowOf(p inspect.PacketTrace) (tracer.Flow, error) {
	dst, err := netip.ParseAddrPort(p.Destination)
	if err != nil {
		return tracer.Flow{}, err
	}
	out := tracer.Flow{Protocol: p.Protocol, Dst: dst, Output: p.FromNode}
	if src, err := netip.ParseAddr(p.Source); err == nil && !p.FromNode && !p.FromAnywhere {
		out.Sources = []netip.Prefix{netip.PrefixFrom(src, src.BitLen())}
	}
	return out, nil
}

// predictionFor returns the prediction for a packet from an address: p is for one that stands for all.
func predictionFor(ctx context.Context, p *inspect.PacketTrace, src netip.Addr, from answers) *inspect.PacketTrace {
	if !p.FromAnywhere {
		return p
	}
	t, err := from.Trace(ctx, inspect.TraceQuery{From: src.String(), To: p.Destination, Protocol: p.Protocol})
	if err != nil || len(t.Packets) != 1 {
		return p
	}
	return &t.Packets[0]
}

// seen turns what the kernel tells of a packet into what is printed.
func seen(p tracer.Packet) inspect.SeenPacket {
	out := inspect.SeenPacket{
		Time: p.Time, Source: p.Src.String(), Destination: p.Dst.String(), In: p.In, Out: p.Out, Answered: p.Replied, Steps: steps(p),
		Masqueraded: p.From.Addr() != p.Src.Addr(),
	}
	for _, s := range p.Steps { // The address of the node may be the one that the packet had anyway.
		out.Masqueraded = out.Masqueraded || s.Hook == "postrouting" && s.Verdict == tracer.Accept && inspect.Masquerades(s.Rule)
	}
	if a := p.Answer; a != nil {
		out.Answer = &inspect.SeenAnswer{Action: ended(*a), Steps: steps(*a), Refuses: a.Reset, From: a.Src.String(), In: a.In}
	}
	switch to := p.To; {
	case to != p.Dst:
		out.Endpoint = to.String()
	case p.Tracked && p.TrackedTo != p.Dst:
		out.Endpoint = p.TrackedTo.String()
	}
	if out.Action = ended(p); out.Action == plan.Pass.String() && out.Endpoint != "" {
		out.Action = plan.Forward.String()
	}
	return out
}

// ended is the action of a packet whose destination stays.
func ended(p tracer.Packet) string {
	switch {
	case p.End == tracer.Drop && len(p.Steps) > 0 && inspect.Rejects(p.Steps[len(p.Steps)-1].Rule):
		return plan.Reject.String()
	case p.End == tracer.Drop:
		return plan.Drop.String()
	case p.End == tracer.Lost:
		return inspect.Lost
	}
	return plan.Pass.String()
}

func steps(p tracer.Packet) []inspect.SeenStep {
	family := nft.FamilyName(plan.FamilyOf(p.Dst.Addr())) + " "
	out := []inspect.SeenStep{}
	for _, s := range p.Steps {
		step := inspect.SeenStep{Verdict: s.Verdict}
		step.Hook, step.Table, step.Chain, step.Rule = strings.ToUpper(s.Hook), strings.TrimPrefix(s.Table, family), s.Chain, s.Rule
		out = append(out, step)
	}
	return out
}

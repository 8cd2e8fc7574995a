package proxier

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// atOnce is how many Services are verified while a sync has to wait.
const atOnce = 64

// Verify makes the ServicePorts of each Service anew, and compares them with the plan and with what was programmed. If anything differs, the
// plan is made anew as a whole, and compared with the kernel. Services that wait for a sync are left out. It returns how many ServicePorts were
// compared.
func (p *Proxier) Verify(ctx context.Context) (count int, found []source.Difference, err error) {
	var all []plan.Service
	p.View(func(s *State) {
		services := map[plan.Service]struct{}{}
		for id := range s.services {
			services[id] = struct{}{}
		}
		for key := range s.plan.Services {
			services[key.Service] = struct{}{}
		}
		all = slices.Collect(maps.Keys(services))
	})
	for some := range slices.Chunk(all, atOnce) {
		p.View(func(s *State) {
			var programmed *plan.Snapshot
			if p.settled.Load() {
				programmed = p.published.Latest()
			}
			for _, id := range some {
				n, differences := s.verify(id, programmed)
				count, found = count+n, append(found, differences...)
			}
		})
		if ctx.Err() != nil {
			return count, found, ctx.Err()
		}
	}
	if len(found) > 0 {
		p.stateMu.Lock()
		p.state.remake()
		p.stateMu.Unlock()
		p.Resync()
	}
	return count, found, nil
}

// verify compares what follows from the objects of a Service with the plan and with what was programmed, unless that is nil.
func (s *State) verify(id plan.Service, programmed *plan.Snapshot) (count int, found []source.Difference) {
	if _, dirty := s.dirty[id]; dirty || s.rebuild || !s.synced {
		return 0, nil
	}
	differs := func(key plan.Key, field, detail string) {
		found = append(found, source.Difference{Part: source.PartPlan, Object: "ServicePort " + key.String(), Field: field, Detail: detail})
	}
	svc := s.services[id]
	if svc == nil {
		svc = &service{}
	}
	wanted := plan.Keys{}
	for i := range svc.specs {
		spec := &svc.specs[i]
		wanted.Add(spec.key)
		count++
		if f := s.misowned(spec); f != "" {
			differs(spec.key, f, "another owner is noted than the objects make")
			continue
		}
		sp, old := s.servicePort(svc, spec), s.plan.Services[spec.key]
		switch {
		case old == nil:
			differs(spec.key, "", "the plan lacks it")
		case !old.Equal(sp):
			differs(spec.key, fieldThatDiffers(old, sp), "the plan has it otherwise than its objects make it")
		case programmed == nil:
		case programmed.ServicePort(spec.key) == nil:
			differs(spec.key, "", "it was not programmed")
		case !programmed.ServicePort(spec.key).Equal(old):
			differs(spec.key, fieldThatDiffers(programmed.ServicePort(spec.key), old), "it was programmed otherwise than the plan has it")
		}
	}
	for _, key := range s.plan.KeysOf(id) {
		if _, ok := wanted[key]; !ok {
			differs(key, "", "the plan has it, and there are no objects of it")
		}
	}
	return count, found
}

// misowned returns a frontend that a spec asks for and whose owner is not the one that should be; "" for none.
func (s *State) misowned(spec *portSpec) string {
	for _, f := range spec.wants {
		c := claimOf(f, spec.key.Family)
		owner, owned := s.claims.owners[c]
		if !owned || owner.compare(claimant{f.Kind, &spec.key}) > 0 || !s.asks(*owner.key, c, owner.kind) {
			return f.String()
		}
	}
	return ""
}

// asks reports whether a ServicePort asks for a claim.
func (s *State) asks(key plan.Key, c claim, kind plan.FrontendKind) bool {
	svc := s.services[key.Service]
	return svc != nil && slices.ContainsFunc(svc.specs, func(spec portSpec) bool {
		return spec.key == key && slices.ContainsFunc(spec.wants, func(f plan.Frontend) bool {
			return f.Kind == kind && claimOf(f, key.Family) == c
		})
	})
}

// remake has the next Update make everything anew from the objects.
func (s *State) remake() {
	s.claims, s.nodePorts, s.rebuild = newClaims(), 0, true
	for _, svc := range s.services {
		for i := range svc.specs {
			s.claim(&svc.specs[i])
		}
	}
	for key := range s.plan.Services { // Also what there are no objects of.
		s.touch(key.Service)
	}
}

// fieldThatDiffers returns the name of the first field in which two ServicePorts differ.
func fieldThatDiffers(a, b *plan.ServicePort) string {
	x, y := reflect.ValueOf(*a), reflect.ValueOf(*b)
	for i := range x.NumField() {
		if !reflect.DeepEqual(x.Field(i).Interface(), y.Field(i).Interface()) {
			return x.Type().Field(i).Name
		}
	}
	return ""
}

// Compare has everything compared with the kernel and repaired, and waits for that, unless ctx ends before.
func (p *Proxier) Compare(ctx context.Context) error {
	done := make(chan struct{})
	p.mu.Lock()
	p.asked = append(p.asked, done)
	p.mu.Unlock()
	p.Suspect("a verification")
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("no comparison with the kernel has ended: %w", ctx.Err())
	}
}

// answer ends the waits of Compare for the comparison that has ended.
func (p *Proxier) answer() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, done := range p.answered {
		close(done)
	}
	p.answered = nil
}

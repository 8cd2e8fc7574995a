package ipvs

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"nodeproxy/ipvs/kernel"
	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/plan/plantest"
)

// picky are virtual servers of a kernel that does not take some changes.
type picky struct {
	fakeServers
	refuses func(kernel.Op) error
	changes int
}

func (k *picky) Apply(ops []kernel.Op) []error {
	var errs []error
	for _, op := range ops {
		k.changes++
		err := k.refuses(op)
		if err == nil {
			err = k.do(op)
		}
		if err != nil && k.virtual[op.Server.ID] == nil && op.Kind == kernel.AddDestination {
			err = unix.ESRCH
		}
		errs = append(errs, err)
	}
	return errs
}

// TestRefusedServer: a virtual server, or a real server, that the kernel does not take is told of, and is no failure: all others are
// there, no difference is found, and it is there once the kernel takes it.
func TestRefusedServer(t *testing.T) {
	for _, kind := range []kernel.OpKind{kernel.AddServer, kernel.AddDestination} {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			p := plantest.Large(20, 3)
			bad := p.Sorted(plan.IPv4)[7]
			want, _ := fakeEngine(plan.IPv4, Options{})
			if err := want.sync(t.Context(), p, nil); err != nil {
				t.Fatal(err)
			}
			e, k := fakeEngine(plan.IPv4, Options{})
			refuse := error(unix.ENOENT)
			servers := &picky{fakeServers: fakeServers{k}}
			servers.refuses = func(op kernel.Op) error {
				if refuse != nil && op.Kind == kind && op.Server.ID.Addr == bad.Frontends[0].Addr &&
					(kind == kernel.AddServer || op.Destination.Addr == bad.All()[1].Addr) {
					return refuse
				}
				return nil
			}
			e.machine.servers = servers
			var told [][]plan.Refusal
			e.tellRefused = func(_ plan.Family, list []plan.Refusal) { told = append(told, list) }
			for range 3 {
				if err := e.sync(t.Context(), p, nil); err != nil || e.desired == nil || e.found.Total() > 0 {
					t.Errorf("%v, found %v", err, e.found)
				}
			}
			kept := kind == kernel.AddDestination
			if len(told) != 1 || len(told[0]) != 1 || told[0][0].Key != bad.Key || told[0][0].Kept != kept {
				t.Errorf("told of %v, want %s", told, bad.Key)
			}
			missing := len(want.held.servers) - len(e.held.servers)
			if missing != map[bool]int{true: 0, false: 1}[kept] {
				t.Errorf("%d virtual servers are missing", missing)
			}
			// Changes of others try nothing of it again.
			other := plantest.LargeService(3, 5000, 3)
			p.Set(other)
			if err := e.sync(t.Context(), p, plan.Keys{other.Key: {}}); err != nil {
				t.Error(err)
			}
			refuse = nil
			if err := e.sync(t.Context(), p, nil); err != nil || e.found.Total() > 0 || len(e.refused) > 0 {
				t.Errorf("%v, found %v, refused %v", err, e.found, e.refused)
			}
			fresh, whole := fakeEngine(plan.IPv4, Options{})
			if err := fresh.sync(t.Context(), p, nil); err != nil {
				t.Fatal(err)
			}
			for id := range fresh.held.servers {
				if e.held.servers[id] == nil || len(e.held.servers[id].destinations) < len(fresh.held.servers[id].destinations) {
					t.Errorf("%s is not whole at the end", id)
				}
			}
			if len(whole.virtual) != len(k.virtual) || len(told) != 2 || len(told[1]) != 0 {
				t.Errorf("%d virtual servers, told of %v", len(k.virtual), told)
			}
			// What concerns more than one Service is a failure, as before.
			refuse = unix.ENOMEM
			again := bad.Key
			p.Delete(again)
			if err := e.sync(t.Context(), p, plan.Keys{again: {}}); err != nil {
				t.Error(err)
			}
			p.Set(bad)
			if err := e.sync(t.Context(), p, plan.Keys{again: {}}); err == nil {
				t.Error("no memory is taken for a refusal")
			}
		})
	}
}

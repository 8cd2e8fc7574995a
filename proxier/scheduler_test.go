package proxier

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
)

func TestScheduler(t *testing.T) {
	t.Parallel()
	const ours, theirs, flags = source.AnnotationScheduler, source.AnnotationKubeRouterScheduler, source.AnnotationKubeRouterSchedFlags
	field := func(key, text string) string {
		return "problem: Service ns/a: metadata.annotations[" + key + "]: " + text
	}
	const names = "rr, wrr, lc, wlc, lblc, lblcr, sh, dh, sed, nq, mh, fo, ovf, twos"
	const otherwise = "; the default scheduler is used for this Service"
	for _, c := range []struct {
		annotations map[string]string
		want        plan.Scheduler
		found       []string
	}{
		{nil, plan.Scheduler{}, nil},
		{map[string]string{"other": "rr"}, plan.Scheduler{}, nil},
		{map[string]string{ours: "wrr"}, plan.Scheduler{Name: "wrr"}, nil},
		{map[string]string{ours: " MH , port,fallback "}, plan.Scheduler{Name: "mh", Ports: true, Fallback: true}, nil},
		{map[string]string{ours: "sh,port"}, plan.Scheduler{Name: "sh", Ports: true}, nil},
		{map[string]string{ours: "sh,sh-fallback"}, plan.Scheduler{Name: "sh", Fallback: true}, nil},
		{map[string]string{theirs: "lc"}, plan.Scheduler{Name: "lc"}, nil},
		{map[string]string{theirs: "mh", flags: "flag-1,flag-2"}, plan.Scheduler{Name: "mh", Ports: true, Fallback: true}, nil},
		{map[string]string{theirs: "sh", flags: "flag-1"}, plan.Scheduler{Name: "sh", Fallback: true}, nil},
		{map[string]string{theirs: "sh", flags: "flag-2"}, plan.Scheduler{Name: "sh", Ports: true}, nil},
		// Ours goes before kube-router's, with its flags.
		{map[string]string{ours: "mh", theirs: "lc", flags: "flag-2"}, plan.Scheduler{Name: "mh"}, nil},
		{map[string]string{ours: "wrr", theirs: "nonsense"}, plan.Scheduler{Name: "wrr"}, nil},
		{map[string]string{source.AnnotationBetaScheduler: "wrr"}, plan.Scheduler{Name: "wrr"}, nil},
		{map[string]string{"service.kubernetes.io/service.beta.kubernetes.io/ipvs-scheduler": "wrr"}, plan.Scheduler{Name: "wrr"}, nil},

		{map[string]string{ours: "best"}, plan.Scheduler{}, []string{field(ours, `"best" is not one of the schedulers `+names+otherwise)}},
		{map[string]string{ours: ""}, plan.Scheduler{}, []string{field(ours, `"" is not one of the schedulers `+names+otherwise)}},
		{map[string]string{ours: "mh,ports"}, plan.Scheduler{}, []string{field(ours, `"ports" is not one of the flags port, fallback`+otherwise)}},
		{map[string]string{ours: "wrr,port"}, plan.Scheduler{}, []string{field(ours, "the scheduler wrr has no flag port; only sh and mh have"+otherwise)}},
		// One that is wrong does not make way for another: nobody should have to guess which counts.
		{map[string]string{ours: "best", theirs: "lc"}, plan.Scheduler{}, []string{field(ours, `"best" is not one of the schedulers `+names+otherwise)}},
		{map[string]string{theirs: "mh", flags: "flag-3"}, plan.Scheduler{}, []string{field(flags, `"flag-3" is not one of the flags port, fallback`+otherwise)}},
		{map[string]string{flags: "flag-1"}, plan.Scheduler{}, []string{field(flags, "there is no annotation "+theirs+" beside it; it is ignored")}},
	} {
		svc := makeService(clusterIPs("10.96.0.1", "fd00::1"), ports(v1.ServicePort{Name: "x", Port: 80}, v1.ServicePort{Name: "y", Port: 81}))
		svc.Annotations = c.annotations
		specs, found := readService(svc, &plan.Settings{}, plan.Families[:])
		if got := said(found); !slices.Equal(got, c.found) {
			t.Errorf("%v: found %q, want %q", c.annotations, got, c.found)
		}
		if len(specs) != 4 {
			t.Fatalf("%v: %d ports, want 4", c.annotations, len(specs))
		}
		for _, spec := range specs {
			if spec.scheduler != c.want {
				t.Errorf("%v: %s: %+v, want %+v", c.annotations, spec.key, spec.scheduler, c.want)
			}
		}
	}
}

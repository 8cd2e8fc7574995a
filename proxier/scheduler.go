package proxier

import (
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// flagged are the schedulers that have flags.
var flagged = []string{"sh", "mh"}

// readScheduler reads the scheduler that a Service's annotations ask for. If any part can't be understood, the whole is ignored:
// half of a request may be worse than the default.
func readScheduler(svc *v1.Service, f *source.Findings) plan.Scheduler {
	i := slices.IndexFunc(source.SchedulerAnnotations, func(key string) bool {
		_, ok := svc.Annotations[key]
		return ok
	})
	flagsText, hasFlags := svc.Annotations[source.AnnotationKubeRouterSchedFlags]
	if i < 0 {
		if hasFlags {
			f.Problem(annotationField(source.AnnotationKubeRouterSchedFlags), "it is ignored", "there is no annotation %s beside it",
				source.AnnotationKubeRouterScheduler)
		}
		return plan.Scheduler{}
	}
	key := source.SchedulerAnnotations[i]
	words := strings.Split(svc.Annotations[key], ",")
	r := &schedulerReader{key: key, f: f}
	r.name(words[0])
	for _, flag := range words[1:] {
		r.flag(flag, key)
	}
	if key == source.AnnotationKubeRouterScheduler && hasFlags {
		for flag := range strings.SplitSeq(flagsText, ",") {
			r.flag(flag, source.AnnotationKubeRouterSchedFlags)
		}
	}
	if r.bad {
		return plan.Scheduler{}
	}
	return r.out
}

type schedulerReader struct {
	key string // the annotation that names the scheduler
	f   *source.Findings
	out plan.Scheduler
	bad bool
}

func (r *schedulerReader) problem(key, detail string, args ...any) {
	r.bad = true
	r.f.Problem(annotationField(key), "the default scheduler is used for this Service", detail, args...)
}

func (r *schedulerReader) name(text string) {
	name := strings.ToLower(strings.TrimSpace(text))
	if !slices.Contains(plan.Schedulers, name) {
		r.problem(r.key, "%.80q is not one of the schedulers %s", text, strings.Join(plan.Schedulers, ", "))
		return
	}
	r.out.Name = name
}

// flag reads a flag: port or fallback, as here and in ipvsadm; or the kernel's numbers, as in kube-router.
func (r *schedulerReader) flag(text, key string) {
	flag := strings.ToLower(strings.TrimSpace(text))
	for _, name := range flagged {
		flag = strings.TrimPrefix(flag, name+"-") // ipvsadm's long names, such as mh-port
	}
	switch flag {
	case "port", "flag-2":
		r.out.Ports = true
	case "fallback", "flag-1":
		r.out.Fallback = true
	default:
		r.problem(key, "%.80q is not one of the flags port, fallback", text)
		return
	}
	if r.out.Name != "" && !slices.Contains(flagged, r.out.Name) {
		r.problem(key, "the scheduler %s has no flag %s; only %s have", r.out.Name, flag, strings.Join(flagged, " and "))
	}
}

func annotationField(key string) string { return "metadata.annotations[" + key + "]" }

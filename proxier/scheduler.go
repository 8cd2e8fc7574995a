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
	var out plan.Scheduler
	bad := false
	problem := func(key, detail string, args ...any) {
		bad = true
		f.Problem(annotationField(key), "the default scheduler is used for this Service", detail, args...)
	}
	key := source.SchedulerAnnotations[i]
	words := strings.Split(svc.Annotations[key], ",")
	if name := strings.ToLower(strings.TrimSpace(words[0])); slices.Contains(plan.Schedulers, name) {
		out.Name = name
	} else {
		problem(key, "%.80q is not one of the schedulers %s", words[0], strings.Join(plan.Schedulers, ", "))
	}
	// A flag is port or fallback, as here and in ipvsadm; or one of the kernel's numbers, as in kube-router.
	readFlag := func(text, key string) {
		flag := strings.ToLower(strings.TrimSpace(text))
		for _, name := range flagged {
			flag = strings.TrimPrefix(flag, name+"-") // ipvsadm's long names, such as mh-port
		}
		switch flag {
		case "port", "flag-2":
			out.Ports = true
		case "fallback", "flag-1":
			out.Fallback = true
		default:
			problem(key, "%.80q is not one of the flags port, fallback", text)
			return
		}
		if out.Name != "" && !slices.Contains(flagged, out.Name) {
			problem(key, "the scheduler %s has no flag %s; only %s have", out.Name, flag, strings.Join(flagged, " and "))
		}
	}
	for _, flag := range words[1:] {
		readFlag(flag, key)
	}
	if key == source.AnnotationKubeRouterScheduler && hasFlags {
		for flag := range strings.SplitSeq(flagsText, ",") {
			readFlag(flag, source.AnnotationKubeRouterSchedFlags)
		}
	}
	if bad {
		return plan.Scheduler{}
	}
	return out
}

func annotationField(key string) string { return "metadata.annotations[" + key + "]" }

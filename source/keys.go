package source

// The annotations that are read.
const (
	// AnnotationScheduler, on a Service, names the scheduler of mode ipvs for it: one of the kernel's names, with flags
	// behind commas for those that have any, such as "mh,port,fallback".
	AnnotationScheduler = "nodeproxy.io/ipvs-scheduler"
	// AnnotationWeights, on an EndpointSlice, gives weights to addresses of that slice, for the weighted schedulers of mode
	// ipvs, such as "10.244.1.5=3,10.244.2.7=1".
	AnnotationWeights = "nodeproxy.io/weights"

	// AnnotationResetTCP, on a Service, is "true" where TCP connections to an endpoint that is gone are to be reset when their
	// clients next send, and "false" where they are not, whatever the flag --reset-tcp says.
	AnnotationResetTCP = "nodeproxy.io/reset-tcp"

	// The two that kube-router reads for a Service's scheduler and its flags.
	AnnotationKubeRouterScheduler  = "kube-router.io/service.scheduler"
	AnnotationKubeRouterSchedFlags = "kube-router.io/service.schedflags"
	// AnnotationBetaScheduler has never been read by Kubernetes itself, but stands in manifests and tutorials, and
	// AnnotationBetaSchedulerPrefixed too, though an API server refuses a key with two slashes: it comes from files only.
	AnnotationBetaScheduler         = "service.beta.kubernetes.io/ipvs-scheduler"
	AnnotationBetaSchedulerPrefixed = "service.kubernetes.io/service.beta.kubernetes.io/ipvs-scheduler"
)

// SchedulerAnnotations are those that can name a Service's scheduler: the first one that is there counts.
var SchedulerAnnotations = []string{
	AnnotationScheduler, AnnotationKubeRouterScheduler, AnnotationBetaScheduler, AnnotationBetaSchedulerPrefixed,
}

// TaintToBeDeleted is what the cluster autoscaler puts on a node that it is about to remove (KEP-3836).
const TaintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

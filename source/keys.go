package source

// The annotations that are read.
const (
	// AnnotationScheduler, on a Service, names its scheduler in modes ipvs and nftables: IPVS's name for it, followed by comma-separated
	// flags for schedulers that have any, such as "mh,port,fallback".
	AnnotationScheduler = "nodeproxy.io/ipvs-scheduler"
	// AnnotationWeights, on an EndpointSlice, gives weights to addresses of that slice, for the weighted schedulers of modes
	// ipvs and nftables, such as "10.244.1.5=3,10.244.2.7=1".
	AnnotationWeights = "nodeproxy.io/weights"

	// AnnotationResetTCP, on a Service, overrides the flag --reset-tcp: "true" resets TCP connections to an endpoint that is gone when
	// their clients next send, "false" does not.
	AnnotationResetTCP = "nodeproxy.io/reset-tcp"

	// The two that kube-router reads for a Service's scheduler and its flags.
	AnnotationKubeRouterScheduler  = "kube-router.io/service.scheduler"
	AnnotationKubeRouterSchedFlags = "kube-router.io/service.schedflags"
	// AnnotationBetaScheduler was never read by Kubernetes itself, but manifests and tutorials have it. The same is true of
	// AnnotationBetaSchedulerPrefixed, which an API server rejects, as the key has two slashes: it comes from files only.
	AnnotationBetaScheduler         = "service.beta.kubernetes.io/ipvs-scheduler"
	AnnotationBetaSchedulerPrefixed = "service.kubernetes.io/service.beta.kubernetes.io/ipvs-scheduler"
)

// SchedulerAnnotations are the annotations that may name a Service's scheduler: the first one present counts.
var SchedulerAnnotations = []string{
	AnnotationScheduler, AnnotationKubeRouterScheduler, AnnotationBetaScheduler, AnnotationBetaSchedulerPrefixed,
}

// TaintToBeDeleted is the taint of a node that the cluster autoscaler is about to remove (KEP-3836).
const TaintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"nodeproxy/source"
)

// gateUse is what a feature gate of kube-proxy does here.
type gateUse string

const (
	// gateHonoured is a gate whose values do what they do in kube-proxy.
	gateHonoured gateUse = "honoured"
	// gateFixed is a gate that is always on, as it is in kube-proxy once it is locked. False is refused.
	gateFixed gateUse = "false is refused"
	// gateIgnored is a gate without effect.
	gateIgnored gateUse = "no effect"
)

// featureGate is a gate that some release of kube-proxy from 1.33 to 1.37 knows.
type featureGate struct {
	first, last string // the releases that know it
	use         gateUse
	why         string
}

const (
	forClients   = "how requests to the API server are made is not adjustable"
	forNFTables  = "it is for mode nftables"
	forLogs      = "the form of the log does not depend on it"
	forWindows   = "it is for Windows"
	forOthers    = "kube-proxy knows the name alone; other components read it"
	forStability = "no gate that is honoured here is alpha or beta"
)

// proxyGates are the gates that kube-proxy itself reads, or whose feature concerns a service proxy.
var proxyGates = map[string]featureGate{
	"AllowServiceExternalIPs": {"1.36", "1.37", gateHonoured, "false: spec.externalIPs of every Service counts as empty (KEP-5707)"},
	"KubeProxyIPVS":           {"1.37", "1.37", gateHonoured, "false: mode ipvs is refused (KEP-5495)"},

	"LoadBalancerIPMode":            {"1.33", "1.34", gateFixed, "ipMode of a load balancer's address always counts"},
	"PreferSameTrafficDistribution": {"1.33", "1.37", gateFixed, "hints for nodes are always followed"},
	"ServiceTrafficDistribution":    {"1.33", "1.35", gateFixed, "hints for zones are always followed"},
	"TopologyAwareHints":            {"1.33", "1.35", gateFixed, "hints for zones are always followed"},

	"MultiCIDRServiceAllocator": {"1.33", "1.37", gateIgnored, "ServiceCIDR objects are read wherever the API server has them"},

	"KubeProxyNFTablesLocalhostNodePorts": {"1.37", "1.37", gateIgnored, forNFTables},
	"NFTablesNetlink":                     {"1.37", "1.37", gateIgnored, forNFTables},
	"NFTablesProxyMode":                   {"1.33", "1.37", gateIgnored, forNFTables},

	"ComponentFlagz":   {"1.33", "1.37", gateIgnored, "/flagz is not served; nodeproxy config prints what is in force"},
	"ComponentSLIs":    {"1.33", "1.34", gateIgnored, "/metrics/slis is always served"},
	"ComponentStatusz": {"1.33", "1.37", gateIgnored, "/statusz is not served; /readyz says how it goes"},
	"NativeHistograms": {"1.36", "1.37", gateIgnored, "histograms are classic ones"},

	"ContextualLogging":   {"1.33", "1.37", gateIgnored, forLogs},
	"LoggingAlphaOptions": {"1.33", "1.37", gateIgnored, forLogs},
	"LoggingBetaOptions":  {"1.33", "1.37", gateIgnored, forLogs},

	"AllAlpha": {"1.33", "1.37", gateIgnored, forStability},
	"AllBeta":  {"1.33", "1.37", gateIgnored, forStability},

	"AtomicFIFO":                   {"1.36", "1.37", gateIgnored, forClients},
	"ClientsAllowCARotation":       {"1.36", "1.37", gateIgnored, forClients},
	"ClientsAllowCBOR":             {"1.33", "1.37", gateIgnored, forClients},
	"ClientsAllowTLSCacheGC":       {"1.36", "1.37", gateIgnored, forClients},
	"ClientsPreferCBOR":            {"1.33", "1.37", gateIgnored, forClients},
	"InOrderInformers":             {"1.33", "1.37", gateIgnored, forClients},
	"InOrderInformersBatchProcess": {"1.35", "1.37", gateIgnored, forClients},
	"InformerResourceVersion":      {"1.33", "1.37", gateIgnored, forClients},
	"UnlockWhileProcessingFIFO":    {"1.36", "1.37", gateIgnored, forClients},
	"WatchListClient":              {"1.33", "1.37", gateIgnored, forClients},

	"WinDSR":     {"1.33", "1.37", gateIgnored, forWindows},
	"WinOverlay": {"1.33", "1.37", gateIgnored, forWindows},
}

// otherGates are those that kube-proxy accepts since all components share one list, by the first and the last release of these
// that knows them.
var otherGates = map[[2]string]string{
	{"1.33", "1.33"}: `
		DevicePluginCDIDevices ElasticIndexedJob LegacySidecarContainers PodDisruptionConditions StatefulSetStartOrdinal`,
	{"1.33", "1.34"}: `
		AllowServiceLBStatusOnNonLB CronJobsScheduledAnnotation PodIndexLabel SizeMemoryBackedVolumes
		StatefulSetAutoDeletePVC StrictCostEnforcementForVAP StrictCostEnforcementForWebhooks
		UserNamespacesPodSecurityStandards`,
	{"1.33", "1.35"}: `
		CSIMigrationPortworx HonorPVReclaimPolicy InPlacePodVerticalScalingAllocatedStatus InTreePluginPortworxUnregister
		MemoryManager StructuredAuthorizationConfiguration WatchFromStorageWithoutResourceVersion`,
	{"1.33", "1.36"}: `
		APIServerTracing AnonymousAuthConfigurableEndpoints AnyVolumeDataSource AuthorizeNodeWithSelectors
		AuthorizeWithSelectors BtreeWatchCache ConsistentListFromCache JobBackoffLimitPerIndex JobPodReplacementPolicy
		JobSuccessPolicy LogarithmicScaleDown OrderedNamespaceDeletion PodLifecycleSleepAction
		PodLifecycleSleepActionAllowZero RelaxedDNSSearchValidation ResilientWatchCacheInitialization RetryGenerateName
		SchedulerQueueingHints SidecarContainers StreamingCollectionEncodingToJSON StreamingCollectionEncodingToProtobuf
		StructuredAuthenticationConfiguration`,
	{"1.33", "1.37"}: `
		APIResponseCompression APIServerIdentity APIServingWithRoutine AggregatedDiscoveryRemoveBetaType AllowDNSOnlyNodeCSR
		AllowInsecureKubeletCertificateSigningRequests AllowOverwriteTerminationGracePeriodSeconds
		AllowParsingUserUIDFromCertAuth AllowUnsafeMalformedObjectDeletion CBORServingAndStorage
		CPUManagerPolicyAlphaOptions CPUManagerPolicyBetaOptions CPUManagerPolicyOptions CRDValidationRatcheting
		CSIVolumeHealth CloudControllerManagerWebhook ClusterTrustBundle ClusterTrustBundleProjection
		ConcurrentWatchObjectDecode ContainerCheckpoint ContainerStopSignals CoordinatedLeaderElection
		CrossNamespaceVolumeDataSource CustomCPUCFSQuotaPeriod CustomResourceFieldSelectors DRAAdminAccess DRADeviceTaints
		DRAPartitionableDevices DRAPrioritizedList DRAResourceClaimDeviceStatus DeclarativeValidation
		DeclarativeValidationTakeover DeploymentReplicaSetTerminatingReplicas DisableAllocatorDualWrite
		DisableCPUQuotaWithExclusiveCPUs DisableNodeKubeProxyVersion DynamicResourceAllocation EventedPLEG ExecProbeTimeout
		ExternalServiceAccountTokenSigner GitRepoVolumeDriver GracefulNodeShutdown GracefulNodeShutdownBasedOnPodPriority
		HPAConfigurableTolerance HPAScaleToZero ImageMaximumGCAge ImageVolume InPlacePodVerticalScaling
		InPlacePodVerticalScalingExclusiveCPUs JobManagedBy KMSv1 KubeletCgroupDriverFromCRI KubeletCrashLoopBackOffMax
		KubeletEnsureSecretPulledImages KubeletFineGrainedAuthz KubeletInUserNamespace KubeletPSI
		KubeletPodResourcesDynamicResources KubeletPodResourcesGet KubeletRegistrationGetOnExistsOnly KubeletSeparateDiskGC
		KubeletServiceAccountTokenForCredentialProviders KubeletTracing ListFromCacheSnapshot
		LocalStorageCapacityIsolationFSQuotaMonitoring MatchLabelKeysInPodAffinity MatchLabelKeysInPodTopologySpread
		MaxUnavailableStatefulSet MemoryQoS MutableCSINodeAllocatableCount MutatingAdmissionPolicy
		NodeInclusionPolicyInPodTopologySpread NodeLogQuery NodeSwap OpenAPIEnums PodAndContainerStatsFromCRI
		PodDeletionCost PodLevelResources PodLogsQuerySplitStreams PodObservedGenerationTracking
		PodReadyToStartContainersCondition PodSchedulingReadiness PodTopologyLabelsAdmission PortForwardWebsockets
		ProcMountType QOSReserved RecoverVolumeExpansionFailure RecursiveReadOnlyMounts ReduceDefaultCrashLoopBackOffDecay
		RelaxedEnvironmentVariableValidation ReloadKubeletServerCertificateFile RemoteRequestHeaderUID ResourceHealthStatus
		RotateKubeletServerCertificate RuntimeClassInImageCriApi SELinuxChangePolicy SELinuxMount
		SELinuxMountReadWriteOncePod SchedulerAsyncPreemption SchedulerPopFromBackoffQ SeparateCacheWatchRPC
		SeparateTaintEvictionController ServiceAccountNodeAudienceRestriction ServiceAccountTokenJTI
		ServiceAccountTokenNodeBinding ServiceAccountTokenNodeBindingValidation ServiceAccountTokenPodNodeInfo
		StorageCapacityScoring StorageNamespaceIndex StorageVersionAPI StorageVersionHash StorageVersionMigrator
		StrictIPCIDRValidation SupplementalGroupsPolicy SystemdWatchdog TopologyManagerPolicyAlphaOptions
		TopologyManagerPolicyBetaOptions TopologyManagerPolicyOptions TranslateStreamCloseWebsocketRequests
		UnauthenticatedHTTP2DOSMitigation UnknownVersionInteroperabilityProxy UserNamespacesSupport VolumeAttributesClass
		WatchCacheInitializationPostStartHook WatchList WindowsCPUAndMemoryAffinity WindowsGracefulNodeShutdown
		WindowsHostNetwork`,
	{"1.34", "1.34"}: `
		ProbeHostPodSecurityStandards`,
	{"1.34", "1.36"}: `
		PreventStaticPodAPIReferences`,
	{"1.34", "1.37"}: `
		ClearingNominatedNodeNameAfterBinding ContainerRestartRules DRAConsumableCapacity DRADeviceBindingConditions
		DRAExtendedResource DRASchedulerFilterTimeout DetectCacheInconsistency EnvFiles HostnameOverride
		InPlacePodVerticalScalingExclusiveMemory KubeletPodResourcesListUseActivePods
		MatchLabelKeysInPodTopologySpreadSelectorMerge NominatedNodeNameForExpectation PodCertificateRequest
		RelaxedServiceNameValidation SchedulerAsyncAPICalls SizeBasedListCostEstimate StatefulSetSemanticRevisionComparison
		StructuredAuthenticationConfigurationEgressSelector TokenRequestServiceAccountUIDValidation`,
	{"1.35", "1.36"}: `
		GangScheduling`,
	{"1.35", "1.37"}: `
		AuthorizePodWebsocketUpgradeCreatePermission CRDObservedGenerationTracking CSIServiceAccountTokenSecrets
		ChangeContainerStatusOnKubeletRestart CloudControllerManagerWatchBasedRoutesReconciliation ConstrainedImpersonation
		DRADeviceTaintRules GenericWorkload InPlacePodLevelResourcesVerticalScaling MutablePVNodeAffinity
		MutablePodResourcesForSuspendedJobs MutableSchedulingDirectivesForSuspendedJobs NodeDeclaredFeatures
		OpportunisticBatching RestartAllContainersOnContainerExits StructuredAuthenticationConfigurationJWKSMetrics
		TaintTolerationComparisonOperators UserNamespacesHostNetworkSupport VolumeLimitScaling`,
	{"1.36", "1.36"}: `
		WorkloadAwarePreemption`,
	{"1.36", "1.37"}: `
		CRIListStreaming DRAListTypeAttributes DRANodeAllocatableResources DRAResourceClaimGranularStatusAuthorization
		DRAResourcePoolStatus DRAWorkloadResourceClaims DeclarativeValidationBeta ExtendWebSocketsToKubelet
		ImageVolumeWithDigest InPlacePodVerticalScalingInitContainers ManifestBasedAdmissionControlConfig PLEGOnDemandRelist
		PersistentVolumeClaimUnusedSinceTime PodLevelResourceManagers PodsAPI ReloadKubeletClientCAFile
		ResourceHealthStatusMessage ServiceCIDRStatusFieldWiping ShardedListAndWatch StaleControllerConsistencyDaemonSet
		StaleControllerConsistencyJob StaleControllerConsistencyReplicaSet StaleControllerConsistencyStatefulSet
		TopologyAwareWorkloadScheduling WorkloadWithJob`,
	{"1.37", "1.37"}: `
		APIServerWebhookAuthenticationToken AtomicWriteVolumeUserFields CompositePodGroup
		ConsistentListFromCacheSkipTimeoutFallback DRADerivedAttributes DRADeviceCompatibilityGroups
		DRAFractionalCapacityRange DRAOptionalNodeOperations DRAPartitionableDevicesType DefaultPodSysctls
		EmptyDirVolumeMode EtcdRangeStream EvictionRequestAPI ExcludeAdmissionWebhookVirtualResources GRPCContainerProbeTLS
		H2CContainerProbe HPAGeneration HPAOptimizedSelectorStore HugepageAwareEviction
		InPlacePodVerticalScalingMemoryBackedVolumes InPlacePodVerticalScalingSchedulerPreemption
		InterPodAffinityHostnameFastPath KubeletAllocatedPodsEndpoint NodeControllerLeaseCircuitBreaker
		NodeLifecycleConditions PodGroupPreemptionPolicy PodLevelResourcesFixDefaulting PodLevelResourcesFixKubeletQOSClass
		SchedulerPreQueueingHints StaleControllerConsistencyHPA StatefulSetRecreateStrategy VolumeBindMountOptions
		WatchListCompression WebhookRoundTripLoadBalancing`,
}

// knownGates are all gates by name.
var knownGates = func() map[string]featureGate {
	out := map[string]featureGate{}
	for name, gate := range proxyGates {
		out[name] = gate
	}
	for releases, names := range otherGates {
		for _, name := range strings.Fields(names) {
			out[name] = featureGate{releases[0], releases[1], gateIgnored, forOthers}
		}
	}
	return out
}()

// gateOn reports whether a gate that is on by default is on.
func (e *Effective) gateOn(name string) bool {
	on, given := e.kp.FeatureGates[name]
	return on || !given
}

// featureGates checks the gates and applies those that have an effect. Like kube-proxy it refuses unknown names: a misspelt gate
// would not switch off what it is meant to.
func (k *checker) featureGates(c *Config) {
	for _, name := range slices.Sorted(maps.Keys(k.kp.FeatureGates)) {
		gate, known := knownGates[name]
		switch {
		case !known:
			k.check("featureGates", fmt.Errorf("%q is not a feature gate of kube-proxy 1.33 to 1.37%s", name, gateLike(name)))
		case gate.use == gateFixed && !k.kp.FeatureGates[name]:
			k.check("featureGates", fmt.Errorf("%s can't be false: %s", name, gate.why))
		}
	}
	c.Settings.IgnoreExternalIPs = !k.gateOn("AllowServiceExternalIPs")
}

// gateLike returns a gate that a misspelt one may have meant.
func gateLike(name string) string {
	for _, other := range slices.Sorted(maps.Keys(knownGates)) {
		a, b := strings.ToLower(name), strings.ToLower(other)
		if a == b || strings.TrimSuffix(a, "s") == strings.TrimSuffix(b, "s") {
			return fmt.Sprintf("; there is %q", other)
		}
	}
	return ""
}

// gateFindings reports the gates that have no effect.
func (e *Effective) gateFindings() []source.Finding {
	reasons := map[string][]string{}
	for name := range e.kp.FeatureGates {
		if gate := knownGates[name]; gate.use == gateIgnored {
			reasons[gate.why] = append(reasons[gate.why], name)
		}
	}
	var out []source.Finding
	for _, why := range slices.Sorted(maps.Keys(reasons)) {
		names := reasons[why]
		slices.Sort(names)
		detail := fmt.Sprintf("no effect of %s: %s", strings.Join(names, ", "), why)
		out = append(out, e.finding(source.Problem, "featureGates", detail, "it is ignored"))
	}
	return out
}

# "make build", "make unit" and "make lint" need nothing but Go. The other targets work as root on a Debian machine; what else
# they need, "make deps" installs.

VERSION ?= $(shell git -c safe.directory='$(CURDIR)' describe --tags --always --dirty 2>/dev/null || echo dev)
BINARY  := bin/nodeproxy
MODE    ?= iptables

# In recipes, git, and with it "go build", would refuse a directory that belongs to another user, as where a container mounts it.
export GIT_CONFIG_COUNT := 1
export GIT_CONFIG_KEY_0 := safe.directory
export GIT_CONFIG_VALUE_0 := $(CURDIR)

# The program, its tests and what checks them are compiled with the same flags, so that no package is compiled twice. Without the name of this
# directory in what is compiled, that of another clone counts as well; without cgo, gcc has no part in it.
export GOFLAGS     := $(filter-out -trimpath,$(shell go env GOFLAGS 2>/dev/null)) -trimpath
export CGO_ENABLED := 0

# A root's PATH may lack them: that of "su" without "-" is its caller's.
export PATH := $(PATH):/usr/local/sbin:/usr/sbin:/sbin

.DELETE_ON_ERROR:
.PHONY: all build deps demo-deps docs man controlplane kubelet kernel guest deploytools neighbours unit integration prove prove-mutations race e2e test test-all test-hostile test-fresh lint bench bench-api bench-ask bench-disturbed bench-iptables bench-ipvs bench-nftables demo image release release-test versions \
	fuzz soak clean tier-1 tier-2

all: build

build:
	go build -ldflags '-s -w -X main.version=$(VERSION)' -o $(BINARY) ./cmd/nodeproxy

deps:
	@hack/install-deps

# What the demo needs, and no more.
demo-deps:
	@hack/install-deps demo $(MODE)

# docs/cli.md from the commands, the tables of docs/configuration.md from the flags and the fields, the chart's schema from the fields, and
# the table of docs/chart.md from its values.
docs:
	UPDATE=1 go test -count=1 -run '^(TestDocs|TestConfigurationFlags)$$' ./cmd/nodeproxy
	UPDATE=1 go test -count=1 -run '^(TestConfigurationFields|TestChartSchema)$$' ./config
	UPDATE=1 go test -count=1 -run '^TestChartValues$$' ./deploy

# Man pages of all commands, in bin/man.
man:
	mkdir -p bin/man
	MAN=$(CURDIR)/bin/man go test -count=1 -run '^TestMan$$' ./cmd/nodeproxy

# A real etcd, kube-apiserver and kube-controller-manager for tests, built once: five minutes or so on two cores.
controlplane:
	@nice e2e/controlplane/build >/dev/null

# The same and a kubelet.
kubelet:
	@nice e2e/controlplane/build kubelet >/dev/null

# A kernel with IPVS for tests, on machines whose own has none; built once: five minutes.
kernel:
	@e2e/kernel/probe || nice e2e/kernel/build >/dev/null

# The same kernel for tests of what is not to happen to this machine's, such as a clock that jumps.
guest:
	@[ "$$(uname -m)" != x86_64 ] || e2e/kernel/build >/dev/null

# helm and kubectl for the tests of deploy/, built once: two minutes.
deploytools:
	@e2e/deploy/tools/build >/dev/null

# A root with firewalls and Docker for the tests of nodeproxy beside them, made once: a minute or two.
neighbours: deps
	@e2e/neighbours/build >/dev/null

# An OCI image archive, bin/nodeproxy-image.tar, without any registry; for "ctr images import". IMAGE is its name without a tag.
# Each build has a tag of its own, by its content, so a DaemonSet that is set to it replaces its pods.
IMAGE ?= $(shell hack/image-name)
image: deps build
	@VERSION=$(VERSION) IMAGE=$(IMAGE) hack/build-image

# All files of a release, in dist: make release VERSION=v1.2.3 IMAGE=registry.example.org/nodeproxy. See docs/releasing.md.
release: deps
	@git diff --quiet HEAD && [ -z "$$(git ls-files --others --exclude-standard)" ] || \
		{ echo "release: there are changes that are not committed" >&2; exit 1; }
	@IMAGE=$(IMAGE) hack/release $(VERSION)

# The versions of Kubernetes, iptables and nft that nodeproxy works with, each tried: a quarter of an hour. See docs/support.md.
versions: deps build
	@hack/versions

# A release made twice, in two places, is the same byte for byte.
release-test: deps
	@hack/release-test

# All packages but those that send packets through the whole program.
PACKAGES = $$(go list ./... | grep -v /e2e)

# The inner loop, in seconds: needs neither root nor any tool or feature of the kernel. NODEPROXY_UNIT skips the tests that do (see
# internal/nstest/unit.go), and -short has property tests try a fifth of the examples.
unit:
	NODEPROXY_UNIT=1 go test -short $(PACKAGES)

# The same tests whole, and those that need the kernel: as root, in network namespaces of their own.
integration: deps kernel guest
	go test -timeout 60m $(PACKAGES)

# The same under the race detector, with a fifth of the examples. The race detector has no room in the test kernel: of packages that
# run there, only the tests that need no kernel.
TESTS     = go list -f '{{.ImportPath}} {{.TestImports}} {{.XTestImports}}' ./... | grep -v '^nodeproxy/e2e'
IN_KERNEL = -e e2e/kernel/inkernel -e ^nodeproxy/internal/nstest
race: deps
	CGO_ENABLED=1 NODEPROXY_UNIT=1 go test -race -short -count=1 -timeout 60m $$($(TESTS) | grep $(IN_KERNEL) | cut -d' ' -f1)
	CGO_ENABLED=1 go test -race -short -count=1 -timeout 60m $$($(TESTS) | grep -v $(IN_KERNEL) | cut -d' ' -f1)

# Real packets through the real binary, in network namespaces.
e2e: deps build kubelet kernel guest deploytools neighbours
	NODEPROXY_BIN=$(CURDIR)/$(BINARY) go test -timeout 45m ./e2e/...

# gofmt, go vet, staticcheck, errcheck, errorlint, unparam, revive, misspell.
lint:
	@hack/lint

# The first tier, before each merge: what can be decided in a quarter of an hour. See docs/testing.md, also for what is in the second one.
# It ends with a comparison of this machine with what it was before.
test:
	@hack/install-deps tier-1
	@hack/unchanged hack/phases tier-1 "$(TIER_1)" -j3

# Both tiers: everything there is.
test-all: deps
	@hack/unchanged hack/phases tier-2 "$(TIER_2)" -j1

# The phases of the first tier, in the order in which they begin once what they need is there. What takes long to build is built with a lower
# priority, while the tests run that need none of it.
TIER_1 = 1-packages 1-prove 1-ipvs 1-iptables 1-nftables 1-kernel 1-cluster 1-cluster-nftables 1-lint 1-demo
.PHONY: $(TIER_1)
tier-1: $(TIER_1)
ifneq ($(filter tier-1,$(MAKECMDGOALS)),)
kernel controlplane: | build
else
kernel guest: | deps
endif

# Packages, with a fifth of the random examples, the same ones in each run, but without what takes minutes (deploy/release compiles for all architectures) or a browser
# (TestPage). Those of e2e have phases of their own, or are in the second tier.
IMPORTS = go list -f '{{.ImportPath}} {{.TestImports}} {{.XTestImports}}' ./... | \
	grep -vE '^nodeproxy/(deploy/release|e2e|e2e/(bench|cluster|demo|deploy|ipvs|kernel|kernel/inkernel)) '
1-packages: build
	@NODEPROXY_SEED=1 hack/phase packages hack/gotest -short -timeout 60m -skip '^TestPage$$' $$($(IMPORTS) | grep -v $(IN_KERNEL) | cut -d' ' -f1)
1-kernel: kernel
	@$(E2E) NODEPROXY_SEED=1 hack/phase kernel hack/gotest -short -timeout 60m $$($(IMPORTS) | grep $(IN_KERNEL) | cut -d' ' -f1)
# A thousand schedules of faults, the same in each run, and the scenarios. Mode ipvs is left out of the former, as its schedules differ from process
# to process: packages has a few.
1-prove: build
	@hack/phase prove sh -c 'hack/prove scenarios && NODEPROXY_MODE=iptables hack/prove 900 && NODEPROXY_MODE=nftables hack/prove 100'
1-lint:
	@hack/phase lint hack/lint

# Packets through the program, in each mode.
E2E = NODEPROXY_BIN=$(CURDIR)/$(BINARY) NODEPROXY_KERNEL_TIMEOUT=3600
1-iptables: build
	@$(E2E) NODEPROXY_TIER=1 hack/phase iptables hack/gotest -timeout 60m ./e2e
1-nftables: build
	@$(E2E) NODEPROXY_TIER=1 NODEPROXY_E2E_MODE=nftables hack/phase nftables hack/gotest -timeout 60m ./e2e
1-ipvs: build kernel
	@$(E2E) NODEPROXY_TIER=1 hack/phase ipvs hack/gotest -timeout 60m ./e2e/ipvs

# A real API server, in the modes of this kernel; in the test kernel, it is for the second tier.
1-cluster: build controlplane
	@$(E2E) NODEPROXY_TIER=1 hack/phase cluster hack/gotest -timeout 60m ./e2e/cluster
1-cluster-nftables 2-cluster-nftables: build controlplane
	@$(E2E) NODEPROXY_TIER=1 NODEPROXY_E2E_MODE=nftables hack/phase cluster-nftables hack/gotest -timeout 60m ./e2e/cluster
2-cluster-ipvs: build controlplane kernel
	@$(E2E) NODEPROXY_TIER=1 NODEPROXY_E2E_MODE=ipvs hack/phase cluster-ipvs hack/gotest -timeout 60m ./e2e/cluster

# Not by "make demo", which would build what others are running.
1-demo: build
	@hack/phase demo sh -c 'go build -o bin/demo ./e2e/demo && NODEPROXY_BIN=$(CURDIR)/$(BINARY) bin/demo'

# The phases of "make test-all", one after the other: some take both processors for minutes.
TIER_2 = 2-lint 2-packages 2-race 2-e2e 2-cluster-nftables 2-cluster-ipvs 2-schedules-nftables 2-schedules-ipvs 2-prove 2-hostile 2-release 2-demo
.PHONY: $(TIER_2)
tier-2: $(TIER_2)

2-lint:
	@hack/phase lint hack/lint all
2-packages: kernel guest
	@hack/phase packages hack/gotest -timeout 60m $(PACKAGES)
2-race:
	@hack/phase race $(MAKE) --no-print-directory race
2-e2e: build kubelet kernel guest deploytools neighbours
	@$(E2E) hack/phase e2e hack/gotest verbose -timeout 90m ./e2e/...
2-schedules-nftables: build controlplane
	@$(E2E) NODEPROXY_E2E_MODE=nftables hack/phase schedules-nftables hack/gotest -timeout 60m -run '^TestSchedules$$/^nft$$' ./e2e/cluster
2-schedules-ipvs: build controlplane kernel
	@$(E2E) NODEPROXY_E2E_MODE=ipvs hack/phase schedules-ipvs hack/gotest -timeout 60m -run '^TestSchedules$$/^nft$$' ./e2e/cluster
2-prove:
	@hack/phase prove $(MAKE) --no-print-directory prove PROVE=2000
2-hostile:
	@hack/phase hostile $(MAKE) --no-print-directory test-hostile
2-release: deploytools
	@hack/phase release hack/release-test
2-demo: build
	@hack/phase demo $(MAKE) --no-print-directory demo

# The tests of the kernel once more, as on a machine that is set up otherwise than most: see hack/hostile. HOSTILE are those that
# send packets; none of them takes long.
HOSTILE_PACKAGES := ./iptables ./ipvs/... ./kernel/... ./node/... ./cmd/nodeproxy ./internal/nstest ./e2e/harness
HOSTILE          ?= TestAffinityKeeps|TestBackendAuto|TestCleanup|TestConnectionsSurvive|TestExternalIPOfAnotherHost|TestForeignRules|TestForwardPolicyDrop|TestHealthCheckNodePort|\
TestInvalidPackets|TestIPVSAddresses|TestIPVSDevice|TestIPVSOneSourcePort|TestIPVSOwnAddress|TestIPVSSCTP|TestLocalhostNotReachable|\
TestMasquerade|TestNodePortAddresses|TestPacketMatrix|TestPodsAsEndpoints|\
TestRenderIsWhatRunApplies|TestRestartUnderLoad|TestSCTP|TestSingleStack|TestSourceRanges|TestStartWritesNothing|TestTakeover|TestTCPReset|TestUDP
test-hostile: deps build kernel guest
	hack/hostile go test -count=1 -timeout 10m $(HOSTILE_PACKAGES)
	NODEPROXY_BIN=$(CURDIR)/$(BINARY) hack/hostile sh -c \
		"go test -count=1 -timeout 29m -v -run '^($(subst $() ,,$(HOSTILE)))' ./e2e ./e2e/ipvs | hack/quiet"

# "make test" in a clone, on a Debian without any package that this installs, and with empty caches: see hack/fresh-root.
test-fresh: deps
	env -u FRESH_BIND -u FRESH_ROOT hack/fresh-root make test

# Changes without end under load, and then a comparison with a new start: SOAK is for how long, SOAK_RATE how many changes a
# second, SOAK_VARIANT nft, legacy or, in place of it, ".*" for both; MODE is one of iptables, ipvs and nftables. See docs/faults.md.
SOAK         ?= 2h
SOAK_RATE    ?= $(if $(filter ipvs,$(MODE)),20,50)
SOAK_VARIANT ?= nft
soak: deps build $(if $(filter ipvs,$(MODE)),kernel)
	SOAK=$(SOAK) SOAK_RATE=$(SOAK_RATE) NODEPROXY_E2E_MODE=$(MODE) NODEPROXY_KERNEL_TIMEOUT=86400 NODEPROXY_BIN=$(CURDIR)/$(BINARY) go test -count=1 -timeout 0 -v \
		-run '^TestSoak$$/^$(SOAK_VARIANT)$$' ./e2e$(if $(filter ipvs,$(MODE)),/ipvs) | hack/quiet

# The daemon in simulated time: PROVE schedules of faults from seed SEED on, in modes iptables, ipvs and nftables in turn, or in PROVE_MODE;
# after them, the first hundred twice, which must be the same. See docs/faults.md.
PROVE      ?= 100000
SEED       ?= 0
PROVE_MODE ?=
prove: deps
	hack/prove scenarios
	NODEPROXY_MODE=$(PROVE_MODE) hack/prove $(PROVE) $(SEED)
	cd cmd/nodeproxy && NODEPROXY_MODE=$(PROVE_MODE) NODEPROXY_SCHEDULES=$(PROVE) NODEPROXY_SCHEDULE=$(SEED) GOMAXPROCS=1 \
		$(CURDIR)/bin/prove -test.timeout 0 -test.v -test.run '^TestProveAgain$$'

# Faults planted in the daemon, each of which prove has to find (hack/mutations/mutations.txt). MUTATION is a regular expression for names.
MUTATION ?=
prove-mutations: deps
	NODEPROXY_MODE=$(PROVE_MODE) go run ./hack/mutations -schedules 10000 -only '$(MUTATION)'

# Benchmarks of single functions.
bench: deps
	go test -run '^$$' -bench . -benchtime 3x ./iptables/... ./proxier/... ./node/... ./plan/...

# The whole program at 10,000 services, on both variants of iptables.
bench-iptables: deps build
	go run ./e2e/bench iptables -binary $(CURDIR)/$(BINARY)

# What questions to a nodeproxy with 10,000 Services cost, and whether they delay a sync. BENCH_ASK holds flags, such as -mode=iptables.
bench-ask: deps build
	go run ./e2e/bench ask -binary $(CURDIR)/$(BINARY) $(BENCH_ASK)

# nodeproxy beside kube-proxy, through a real API server with 10,000 services: a quarter of an hour. BENCH_API holds flags, such as
# -mode=nftables or -backend=legacy.
bench-api: deps build controlplane
	go run ./e2e/bench api -binary $(CURDIR)/$(BINARY) $(BENCH_API)

# nodeproxy alone while other programs get in its way, in the modes of this kernel: 35 minutes. BENCH_API holds flags. For mode ipvs:
# make bench-ipvs BENCH_IPVS='-only=nodeproxy -parts=proxies -disturb=all'.
bench-disturbed: deps build controlplane
	go build -o bin/bench ./e2e/bench
	missed=0; for mode in "iptables -backend=nft" "iptables -backend=legacy" nftables; do \
		bin/bench api -binary $(CURDIR)/$(BINARY) -only=nodeproxy -disturb=all -mode=$$mode $(BENCH_API) || missed=1; \
	done; exit $$missed

# nodeproxy beside kube-proxy, both in mode ipvs, on a kernel with IPVS: half an hour. BENCH_IPVS holds flags.
bench-ipvs: deps build controlplane kernel
	go run ./e2e/bench ipvs -binary $(CURDIR)/$(BINARY) $(BENCH_IPVS)

# nodeproxy in mode nftables beside kube-proxy in its mode of this name and beside mode iptables, with each of these numbers of
# Services and endpoints. BENCH_NFTABLES holds flags, such as -limit=3m.
BENCH_NFTABLES_SIZES ?= 10000x2 45000x1 5000x50
bench-nftables: deps build controlplane
	go build -o bin/bench ./e2e/bench
	missed=0; for size in $(BENCH_NFTABLES_SIZES); do \
		bin/bench nftables -binary $(CURDIR)/$(BINARY) -services=$${size%x*} -endpoints=$${size#*x} $(BENCH_NFTABLES) || missed=1; \
	done; exit $$missed

# MODE=ipvs runs in the test kernel, on machines whose own has no IPVS; e2e/kernel/run builds it.
demo: demo-deps build
	CGO_ENABLED=0 go build -o bin/demo ./e2e/demo
	NODEPROXY_BIN=$(CURDIR)/$(BINARY) NODEPROXY_E2E_MODE=$(MODE) $(if $(filter ipvs,$(MODE)),e2e/kernel/run) bin/demo

# FUZZTIME for each fuzz target.
FUZZTIME ?= 60s
fuzz: deps
	@for f in $$(grep -rl '^func Fuzz' --include=*_test.go .); do \
		for t in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9]*\).*/\1/p' $$f); do \
			echo "$$(dirname $$f) $$t"; go test -run '^$$' -fuzz "^$$t$$" -fuzztime $(FUZZTIME) $$(dirname $$f) || exit 1; \
		done; \
	done

clean:
	rm -rf bin dist

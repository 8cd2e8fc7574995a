package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	v1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"nodeproxy/config"
	"nodeproxy/inspect"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// answers are what commands that look at Services get their answers from: the daemon on this node, or objects that they read themselves.
type answers interface {
	ServicePorts(ctx context.Context, of plan.Service) ([]inspect.ServicePort, error)
	CountedServicePorts(ctx context.Context, of plan.Service) ([]inspect.ServicePort, error)
	Explain(ctx context.Context, svc plan.Service) (*inspect.Explanation, error)
	Findings(ctx context.Context) ([]inspect.Finding, error)
	Trace(ctx context.Context, q inspect.TraceQuery) (*inspect.Trace, error)
}

// inspector has what such a command should look at, and how it should print that.
type inspector struct {
	flags     config.Flags
	given     func(flag string) bool
	socket    func() string
	namespace string
	output    string
	forms     []string // that output can have, the default first
	// incomplete is set once something of the objects that the command reads had to be left out.
	incomplete bool
}

// add defines the flags that all such commands share.
func (i *inspector) add(cmd *cobra.Command, outputs string) { i.addAs(cmd, "explain", outputs) }

// addRunning defines the flags of commands that only the daemon can answer.
func (i *inspector) addRunning(cmd *cobra.Command, outputs string) { i.addAs(cmd, "history", outputs) }

func (i *inspector) addAs(cmd *cobra.Command, name, outputs string) {
	i.addFlags(cmd, name)
	cmd.Flags().StringVarP(&i.namespace, "namespace", "n", "default", "namespace of Services that are named without one")
	cmd.Flags().StringVarP(&i.output, "output", "o", "", "form of the output: "+outputs)
	i.forms = formsIn(outputs)
	refuse := cmd.PreRunE
	cmd.PreRunE = func(cmd *cobra.Command, args []string) error {
		if err := refuse(cmd, args); err != nil {
			return err
		}
		return oneOf("output", cmp.Or(i.output, i.forms[0]), i.forms) // Before it reads or asks anything.
	}
	_ = cmd.RegisterFlagCompletionFunc("namespace", i.completeNamespace) // It fails only for a flag that does not exist.
	if strings.Contains(cmd.Use, " [NAMESPACE/]SERVICE") || strings.Contains(cmd.Use, " [[NAMESPACE/]NAME]") {
		cmd.ValidArgsFunction = i.completeService
	}
}

// addFlags defines those of run's flags that the command with a name reads.
func (i *inspector) addFlags(cmd *cobra.Command, name string) {
	i.flags.Add(cmd.Flags())
	i.given, i.socket = cmd.Flags().Changed, func() string { return cmd.Flags().Lookup("socket").Value.String() }
	refuseOthersAs(cmd, name)
}

const inspectHelp = `
It asks the nodeproxy that runs on this node through its socket (--socket), which only root may do. In a DaemonSet, use "kubectl exec".
With --manifests (- for standard input), --kubeconfig or --master it works the answer out from those objects instead, without root, for
the node that --node-name names:

  kubectl get services,endpointslices,nodes -A -o json | nodeproxy %s --manifests=- --node-name=NODE

Exit codes: 0 if all is well; 1 if there is a problem, if what the command names is not known, or if the answer is incomplete because
something could not be read; 2 if the command line is wrong.`

// elsewhere is what else there is to do for those who ask a daemon that does not answer.
const elsewhere = "; to look at a cluster or at files without it, use --kubeconfig or --manifests"

// answers returns where answers come from.
func (i *inspector) answers(ctx context.Context, stdin io.Reader, stderr io.Writer) (answers, error) {
	if !slices.ContainsFunc([]string{"manifests", "kubeconfig", "master", "config"}, i.given) {
		return i.client(elsewhere), nil
	}
	cfg, err := i.flags.Config()
	if err != nil {
		return nil, &usageError{err}
	}
	var found []source.Finding
	var pods []*v1.Pod
	leftOut := i.leftOut(stderr)
	state, err := readState(ctx, cfg, stdin, func(f source.Finding) {
		found = append(found, f)
		leftOut(f)
	}, func(p *v1.Pod) { pods = append(pods, p) })
	if err != nil {
		return nil, err
	}
	return ownAnswers{&inspect.Node{
		Mode: cfg.Mode, View: func(read func(*proxier.State)) { read(state) }, Findings: func() []source.Finding { return found },
		Pods:    podReader(ctx, cfg, pods),
		Machine: machineOf(cfg), OnlyProxied: cfg.Manifests == "",
	}}, nil
}

// leftOut prints findings of what has to be left out.
func (i *inspector) leftOut(stderr io.Writer) source.Report {
	return func(f source.Finding) {
		if f.LeftOut {
			i.incomplete = true
			printFinding(stderr, f)
		}
	}
}

func printFinding(w io.Writer, f source.Finding) {
	fmt.Fprintf(w, "%s: %s\n", f.Severity, inspect.Printable(f.String()))
}

// podReader returns what reads Pods: those of manifests, nil if there are none among them, or else those of the cluster.
func podReader(ctx context.Context, cfg *config.Config, pods []*v1.Pod) func(string) ([]*v1.Pod, error) {
	if len(pods) > 0 {
		return func(string) ([]*v1.Pod, error) { return pods, nil }
	}
	if cfg.Manifests != "" {
		return nil
	}
	return func(namespace string) ([]*v1.Pod, error) {
		client, err := newClient(cfg, nil)
		if err != nil {
			return nil, err
		}
		return client.Pods(ctx, namespace)
	}
}

// readState reads the objects that a configuration names, once. It calls pod, unless it is nil, with each Pod of manifests.
func readState(ctx context.Context, cfg *config.Config, stdin io.Reader, report source.Report, pod func(*v1.Pod)) (*proxier.State, error) {
	state := proxier.NewState(cfg.NodeName, cfg.Settings, plan.Families[:], unlessSaid(cfg, report))
	var batch source.Batch
	var err error
	if cfg.Manifests != "" {
		batch, err = readManifests(cfg, stdin, report, pod)
		if _, ok := batch.Nodes[cfg.NodeName]; !ok && len(batch.Nodes) > 0 && err == nil {
			nodes := slices.Sorted(maps.Keys(batch.Nodes))
			return nil, &usageError{fmt.Errorf("--node-name: there is no Node %q among the objects; there is %s", cfg.NodeName, strings.Join(nodes[:min(len(nodes), 5)], ", "))}
		}
	} else {
		var reserved []netip.AddrPort
		batch, reserved, err = readCluster(ctx, cfg, report)
		state.Reserve(reserved)
	}
	if err != nil {
		return nil, err
	}
	state.Apply(batch)
	state.Update()
	return state, nil
}

// unlessSaid reports what the proxier finds. Why Services of manifests are not proxied has been reported when these were read, with file and line.
func unlessSaid(cfg *config.Config, report source.Report) source.Report {
	return func(f source.Finding) {
		if cfg.Manifests == "" || f.Effect != source.NotForProxy {
			report(f)
		}
	}
}

// ownAnswers are those of objects that the command has read.
type ownAnswers struct{ node *inspect.Node }

func (a ownAnswers) ServicePorts(_ context.Context, of plan.Service) ([]inspect.ServicePort, error) {
	return a.node.ServicePorts(of), nil
}

func (a ownAnswers) CountedServicePorts(ctx context.Context, of plan.Service) ([]inspect.ServicePort, error) {
	return a.ServicePorts(ctx, of)
}

func (a ownAnswers) Explain(_ context.Context, svc plan.Service) (*inspect.Explanation, error) {
	return a.node.Explain(svc)
}

func (a ownAnswers) Findings(context.Context) ([]inspect.Finding, error) {
	return a.node.AllFindings(), nil
}

func (a ownAnswers) Trace(_ context.Context, q inspect.TraceQuery) (*inspect.Trace, error) {
	return a.node.Trace(q)
}

// client returns what asks the daemon. Its errors say what to do where there is none, or else to do elsewhere.
func (i *inspector) client(elsewhere string) *inspect.Client {
	c := inspect.NewClient(i.socket())
	c.Advise = func(err error) error { return unanswered(err, i.socket(), elsewhere) }
	return c
}

// unanswered returns the error of a question to the daemon, with what to do where there is none.
func unanswered(err error, socket, elsewhere string) error {
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("no nodeproxy answers at %s on this node: is it running, and are you where it runs (kubectl exec)? "+
			"One that still waits for another proxy to end does not answer either%s", socket, elsewhere)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("only root may ask the nodeproxy of this node (%s): run this as root%s", socket, elsewhere)
	}
	var silent *inspect.SilentError
	if errors.As(err, &silent) {
		return fmt.Errorf("the nodeproxy at %s %w: it may hang or be stopped, or have too many questions to answer; its log and /readyz of its port for health "+
			"say more%s", socket, err, elsewhere)
	}
	return err
}

// service reads the name of a Service, if there is one.
func (i *inspector) service(args []string) (plan.Service, error) {
	if len(args) == 0 {
		return plan.Service{}, nil
	}
	svc, ok := plan.ParseService(args[0], i.namespace)
	if !ok {
		return plan.Service{}, &usageError{fmt.Errorf("%q is not the name of a Service: want NAME, NAMESPACE/NAME or a name of DNS, such as NAME.NAMESPACE", args[0])}
	}
	return svc, nil
}

// show prints an answer as JSON or YAML, or calls table with the name of another form. It returns an error if the answer tells of
// a problem, or is incomplete.
func (i *inspector) show(w io.Writer, answer any, problem bool, table func(form string) error) error {
	var err error
	switch form := cmp.Or(i.output, i.forms[0]); form {
	case "json":
		e := json.NewEncoder(w)
		e.SetIndent("", "    ")
		err = e.Encode(answer)
	case "yaml":
		var text []byte
		if text, err = yaml.Marshal(answer); err == nil {
			_, err = w.Write(text)
		}
	default:
		err = table(form)
	}
	switch {
	case err != nil:
		return err
	case i.incomplete:
		return errIncomplete
	case problem:
		return errProblem
	}
	return nil
}

var (
	// errProblem makes the exit code 1. What is wrong has been printed.
	errProblem    = errors.New("")
	errIncomplete = errors.New("some manifests or objects can't be read or used (see the problems above), so the answer is incomplete")
)

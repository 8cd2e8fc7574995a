package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"time"

	"github.com/spf13/cobra"
	v1 "k8s.io/api/core/v1"

	"nodeproxy/config"
	"nodeproxy/plan"
	"nodeproxy/source"
	"nodeproxy/source/apiserver"
	"nodeproxy/source/manifest"
)

func renderCommand() *cobra.Command {
	flags := &config.Flags{}
	r := &renderer{}
	cmd := &cobra.Command{
		Use:   "render [FILE|DIRECTORY|-]",
		Short: "Print the rules that run would write for manifests, or for a cluster",
		Long: "render prints, as input for iptables-restore, the rules that run would write for manifests, or for the objects of a\n" +
			"cluster. It does not need root, and changes nothing. Notes and problems go to standard error. In mode ipvs each\n" +
			"section begins with a comment that names the program whose input it is: ipset restore, ipvsadm --restore, ip -batch and\n" +
			"iptables-restore. Both families add the device kube-ipvs0, so the second needs ip -force. The section \"nftables by\n" +
			"netlink\" describes what nodeproxy writes without a program. In mode nftables it is input for nft -f.\n\n" +
			"The manifests are those of the argument or of --manifests; - is standard input. With --kubeconfig or --master instead\n" +
			"of them, the objects are read once from the API server, which has a minute to deliver them. One of the two is required, even\n" +
			"in a pod.\n\n" +
			"If a file can't be read, or an object has to be left out, render prints no rules and exits with code 1; with --lenient\n" +
			"it prints the rules of everything else.\n\n" +
			"With both families in one text, every rule begins with -4 or -6, so that iptables-restore and ip6tables-restore\n" +
			"each take their own; --family=ipv4 or ipv6 prints one family without that.",
		Args: atMost(1, "one file or directory"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				if cmd.Flags().Changed("manifests") {
					return &usageError{fmt.Errorf("%q: the manifests are given by --manifests already", args[0])}
				}
				if err := cmd.Flags().Set("manifests", args[0]); err != nil {
					return &usageError{err}
				}
			}
			cfg, err := flags.Config()
			if err != nil {
				return &usageError{err}
			}
			if cfg.Manifests == "" && cfg.API.Kubeconfig == "" && cfg.API.Master == "" {
				return &usageError{errors.New("--manifests: one of --manifests, --kubeconfig and --master is required, or a file: render needs objects")}
			}
			if err := oneOf("family", r.family, enumerated["family"]); err != nil {
				return err
			}
			leftOut := 0
			report := func(f source.Finding) {
				printFinding(cmd.ErrOrStderr(), f)
				if f.LeftOut {
					leftOut++
				}
			}
			text, err := r.render(cmd.Context(), cfg, cmd.InOrStdin(), report)
			if err != nil {
				return err
			}
			if leftOut > 0 && !r.lenient {
				return errors.New("some manifests or objects can't be read or used (see the problems above), so no rules are printed; --lenient prints those of all others")
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), text)
			return err
		},
	}
	flags.Add(cmd.Flags())
	cmd.Flags().StringVar(&r.family, "family", "all", "families to print: ipv4, ipv6 or all")
	cmd.Flags().BoolVar(&r.lenient, "lenient", false, "print rules though something can't be read or has to be left out")
	return cmd
}

// renderer prints rules.
type renderer struct {
	family  string
	lenient bool
}

// readManifests reads the objects of files, and calls pod, unless it is nil, with each Pod.
func readManifests(cfg *config.Config, stdin io.Reader, report source.Report, pod func(*v1.Pod)) (source.Batch, error) {
	files := manifestConfig(cfg, report, newLog(cfg))
	files.Pod = pod
	if cfg.Manifests == "-" {
		files.Path = "standard input"
		return manifest.Read(files, stdin)
	}
	// A pipe, as of process substitution, is named, but can be read only once.
	if info, err := os.Stat(cfg.Manifests); err == nil && !info.IsDir() && !info.Mode().IsRegular() {
		f, err := openPipe(cfg.Manifests, pipeOpens)
		if err != nil {
			return source.Batch{}, fmt.Errorf("manifests: %w", err)
		}
		defer f.Close()
		return manifest.Read(files, f)
	}
	return manifest.Load(files)
}

// pipeOpens is how long a program may take to open the other end of a named pipe.
const pipeOpens = 30 * time.Second

// openPipe opens what is not a regular file. Where it is a named pipe that nobody writes to, it gives up.
func openPipe(path string, within time.Duration) (*os.File, error) {
	type opened struct {
		file *os.File
		err  error
	}
	done := make(chan opened, 1)
	go func() {
		f, err := os.Open(path)
		done <- opened{f, err}
	}()
	select {
	case o := <-done:
		return o.file, o.err
	case <-time.After(within):
		return nil, fmt.Errorf("%s is a pipe that no program has opened for writing within %s", path, within)
	}
}

// readCluster reads the objects of a cluster, and the addresses of its API server.
func readCluster(ctx context.Context, cfg *config.Config, report source.Report) (source.Batch, []netip.AddrPort, error) {
	log := newLog(cfg)
	apiserver.RedirectLogs(log)
	client, err := newClient(cfg, nil)
	if err != nil {
		return source.Batch{}, nil, &usageError{err}
	}
	location, err := client.Location(log)
	if err != nil {
		return source.Batch{}, nil, &usageError{err}
	}
	batch, err := apiserver.Load(ctx, apiserver.Config{Client: client, NodeName: cfg.NodeName, Log: log, Report: report})
	if err != nil {
		return source.Batch{}, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, locateFirst)
	defer cancel()
	addresses, err := location.Addresses(ctx)
	if err != nil { // A proxy may know the name.
		report(source.Finding{
			Severity: source.Problem, Detail: err.Error(), Effect: "a Service that asks for one of its addresses and its port gets it here",
		})
	}
	return batch, addresses, nil
}

func (r *renderer) render(ctx context.Context, cfg *config.Config, stdin io.Reader, report source.Report) (string, error) {
	state, err := readState(ctx, cfg, stdin, report, nil)
	if err != nil {
		return "", err
	}
	families := map[string][]plan.Family{"ipv4": {plan.IPv4}, "ipv6": {plan.IPv6}, "all": plan.Families[:]}[r.family]
	return modeNamed(cfg.Mode).render(cfg, state.Plan(), families), nil
}

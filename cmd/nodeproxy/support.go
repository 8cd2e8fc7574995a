package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"nodeproxy/cmd/nodeproxy/bugreport"
	"nodeproxy/inspect"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// logKept is how many bytes of the log are kept for a bug report.
const logKept = 256 << 10

// recentLog keeps the last lines of the log.
var recentLog logTail

// logTail is a writer that keeps the last logKept bytes, whole lines.
type logTail struct {
	mu    sync.Mutex
	lines [][]byte
	size  int
}

// Write implements io.Writer. Each call is a line, as package slog makes them.
func (l *logTail) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines, l.size = append(l.lines, bytes.Clone(line[:min(len(line), logKept)])), l.size+min(len(line), logKept)
	for l.size > logKept {
		l.size -= len(l.lines[0])
		l.lines = l.lines[1:]
	}
	return len(line), nil
}

func (l *logTail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(bytes.Join(l.lines, nil))
}

// answer is a response in memory.
type answer struct {
	bytes.Buffer
	header http.Header
}

func (a *answer) Header() http.Header { return a.header }
func (a *answer) WriteHeader(int)     {}

// support returns what a bug report has of this daemon besides what other questions answer, by name of the file.
func (d *daemon) support() map[string]string {
	cfg, err := json.MarshalIndent(d.cfg.Configz, "", "    ")
	if err != nil {
		cfg = []byte(err.Error())
	}
	text := &answer{header: http.Header{}}
	if req, err := http.NewRequestWithContext(d.ctx, http.MethodGet, "/metrics", nil); err == nil {
		d.metrics.Handler().ServeHTTP(text, req)
	}
	return map[string]string{"config.json": string(cfg), "metrics.txt": text.String(), "log.txt": recentLog.String()}
}

func supportCommand() *cobra.Command {
	i, file, hash := &inspector{}, "", false
	cmd := &cobra.Command{
		Use:   "support",
		Short: "Write a file for a bug report: state, history, configuration, rules and log of this node",
		Long: "support writes a compressed archive for a bug report, which only its owner can read, and lists what is in it: the status, Services, findings,\n" +
			"history, configuration, metrics and latest log of the running nodeproxy, the version of the system, and the rules of nodeproxy and kube-proxy in\n" +
			"the kernel. It includes names and addresses of Services and endpoints, and only those annotations that a finding quotes. It leaves out\n" +
			"kubeconfig files, certificates and tokens. If no nodeproxy answers, it has what can be seen without one.\n\n" +
			"With --hash-names, it replaces the names of namespaces, objects and hosts, and all addresses except loopback ones, by hashes. A name has the\n" +
			"same hash throughout the archive, and another one in the next archive. Ports and their names, files and interfaces are left as they are.\n" + runningHelp,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			now := time.Now()
			if file == "" {
				file = "nodeproxy-support-" + now.UTC().Format("20060102-150405") + ".tar.gz"
			}
			health, err := i.health()
			if err != nil {
				return err
			}
			report := gather(cmd.Context(), i.client(""), health)
			has := "it has names and addresses of Services and endpoints"
			if hash {
				bugreport.HashNames(report)
				has = "names and addresses are replaced by hashes where they are recognised, and a message may quote others"
			}
			w := cmd.OutOrStdout()
			if file == "-" {
				if err := bugreport.Write(w, report, now); err != nil {
					return err
				}
				w, file = cmd.ErrOrStderr(), "standard output"
			} else if err := bugreport.Create(file, report, now); errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
				return fmt.Errorf("%w; -o - writes the archive to standard output, and -o FILE elsewhere", err)
			} else if err != nil {
				return err
			}
			for _, f := range report {
				fmt.Fprintf(w, "%9d  %s\n", len(f.Text), f.Name)
			}
			fmt.Fprintf(w, "Written to %s. Look through it before you give it to anybody: %s.\n", file, has)
			return nil
		},
	}
	i.addFlags(cmd, "status")
	cmd.Flags().BoolVar(&hash, "hash-names", false, "replace names and addresses by hashes")
	cmd.Flags().StringVarP(&file, "output", "o", "", "file to write, which must not exist, or - for standard output; by default nodeproxy-support-TIME.tar.gz in the current directory")
	return cmd
}

// gather collects a bug report. What can't be read is replaced by the reason.
func gather(ctx context.Context, client *inspect.Client, health netip.AddrPort) []bugreport.File {
	var out []bugreport.File
	add := func(name, text string) {
		out = append(out, bugreport.File{Name: name, Text: bugreport.Redact(text)})
	}
	add("version.txt", version+"\n")
	status, err := client.Status(ctx)
	if err == nil {
		var text strings.Builder
		_ = inspect.WriteStatus(&text, status) // A Builder takes everything.
		add("status.txt", text.String())
		add("status.json", asJSON(status, nil))
		add("services.json", asJSON(client.ServicePorts(ctx, plan.Service{})))
		add("findings.json", asJSON(client.Findings(ctx)))
		add("history.json", asJSON(client.History(ctx, plan.Service{})))
		files, err := client.Support(ctx)
		if err != nil {
			files = map[string]string{"config.json": err.Error()}
		}
		for _, name := range []string{"config.json", "metrics.txt", "log.txt"} {
			if text := files[name]; text != "" {
				add(name, text)
			}
		}
	} else {
		var text strings.Builder
		fmt.Fprintf(&text, "%s\n\n", err)
		writeFromOutside(ctx, &text, "/proc", health)
		add("status.txt", text.String())
	}
	var system strings.Builder
	for _, file := range []string{"/proc/version", "/etc/os-release", "/proc/uptime", "/proc/loadavg", "/proc/sys/net/netfilter/nf_conntrack_count",
		"/proc/sys/net/netfilter/nf_conntrack_max", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding",
		"/proc/sys/net/ipv4/conf/all/rp_filter", "/proc/sys/net/ipv4/conf/all/route_localnet"} {
		text, err := os.ReadFile(file)
		if err != nil {
			text = []byte(err.Error())
		}
		fmt.Fprintf(&system, "== %s\n%s\n", file, bytes.TrimSpace(text))
	}
	add("system.txt", system.String())
	for _, c := range []struct {
		file, command string
		keep          func(line string) bool
	}{
		{"iptables-version.txt", "iptables --version", nil}, {"iptables-nft.txt", "iptables-nft-save", ofKube}, {"ip6tables-nft.txt", "ip6tables-nft-save", ofKube},
		{"iptables-legacy.txt", "iptables-legacy-save", ofKube}, {"ip6tables-legacy.txt", "ip6tables-legacy-save", ofKube},
		{"nft-ip.txt", "nft list table ip " + names.NFTables, nil}, {"nft-ip6.txt", "nft list table ip6 " + names.NFTables, nil},
		{"ipvs.txt", "ipvsadm -Ln", nil}, {"ipset.txt", "ipset save", func(line string) bool { return strings.Contains(line, " KUBE-") }},
	} {
		add(c.file, listed(ctx, c.command, c.keep))
	}
	return out
}

// ofKube reports whether a line of iptables-save is about chains of nodeproxy or kube-proxy, or begins or ends a table.
func ofKube(line string) bool {
	return strings.Contains(line, "KUBE-") || strings.HasPrefix(line, "*") || strings.HasPrefix(line, "COMMIT")
}

// mostOutput is how many bytes of one command's output a bug report has.
const mostOutput = 32 << 20

// listed runs a command that lists something, and returns those lines that keep returns true for; all if it is nil.
func listed(ctx context.Context, command string, keep func(string) bool) string {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	words := strings.Fields(command)
	text, err := exec.CommandContext(ctx, words[0], words[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Sprintf("%s: %v\n%s", command, err, text[:min(len(text), 1000)])
	}
	var out strings.Builder
	for line := range strings.Lines(string(text)) {
		if out.Len() > mostOutput {
			out.WriteString("… and more\n")
			break
		}
		if keep == nil || keep(line) {
			out.WriteString(line)
		}
	}
	return out.String()
}

func asJSON(value any, err error) string {
	if err == nil {
		var text []byte
		if text, err = json.MarshalIndent(value, "", "    "); err == nil {
			return string(text) + "\n"
		}
	}
	return err.Error()
}

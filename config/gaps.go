package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// noMeaning lists fields without effect, and why they have none.
var noMeaning = map[string]string{
	"showHiddenMetricsForVersion": "no metric is hidden",
	"configSyncPeriod":            "objects are watched; every change is seen at once",
	"portRange":                   "no ports are reserved; kube-proxy has no use for it either",
	"winkernel":                   "it is for Windows",
	"windowsRunAsService":         "it is for Windows",
	"logging.flushFrequency":      "the log is not buffered",
	"logging.vmodule":             "log levels are for the whole program",
	"logging.options":             "there is one stream for the log, without a buffer",
	"iptables":                    "it is for modes iptables and ipvs",
	"ipvs":                        "it is for mode ipvs",
	"nftables":                    "it is for mode nftables",
}

// ignoredFlags lists flags that have neither a field nor an effect, with the value that they have where they are given without one: those
// of klog in kube-proxy before 1.26, and two that it has by accident.
var ignoredFlags = map[string]string{
	"logtostderr": "true", "alsologtostderr": "true", "log-dir": "", "log-file": "", "log-file-max-size": "",
	"stderrthreshold": "", "one-output": "true", "skip-headers": "true", "skip-log-headers": "true",
	"add-dir-header": "true", "log-backtrace-at": "", "boot-id-file": "", "machine-id-file": "",
}

// deprecatedFlags maps flags that still work to what to use instead.
var deprecatedFlags = map[string]string{
	"healthz-port": "--healthz-bind-address", "metrics-port": "--metrics-bind-address",
}

// findings returns findings about values of the file that flags override, and about values without effect.
func (e *Effective) findings() []source.Finding {
	var out []source.Finding
	if e.doc != nil {
		out = append(out, e.doc.ignored...)
	}
	for _, field := range e.saidFields() {
		if o, ok := e.overridden(field); ok {
			out = append(out, source.Finding{Severity: source.Problem, Where: e.doc.at(field), Field: field,
				Detail: fmt.Sprintf("%s here, %s by %s", o.file, o.flag, e.given[field]), Effect: "the flag overrides the file"})
		}
		if detail, effect := e.gap(field); detail != "" {
			out = append(out, e.finding(source.Problem, field, detail, effect))
		}
	}
	out = append(out, e.gateFindings()...)
	for _, name := range slices.Sorted(maps.Keys(ignoredFlags)) {
		if flag := "--" + name; e.given[flag] != "" {
			out = append(out, e.finding(source.Problem, flag, "it has no meaning here", "it is ignored"))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(deprecatedFlags)) {
		if flag := "--" + name; e.given[flag] != "" {
			out = append(out, e.finding(source.Problem, flag, "deprecated", "use "+deprecatedFlags[name]))
		}
	}
	switch mode := plan.DetectLocalMode(e.kp.DetectLocalMode); {
	case e.kp.ClusterCIDR != "" && mode != plan.DetectClusterCIDR:
		out = append(out, e.finding(source.Note, "clusterCIDR",
			"not used with "+e.saying("detectLocalMode", string(mode)), "traffic of pods is recognised without it"))
	case e.kp.ClusterCIDR == "" && mode == plan.DetectClusterCIDR:
		out = append(out, e.finding(source.Note, "clusterCIDR", "not given",
			"traffic from pods can't be distinguished from other traffic, so none is masqueraded because it comes from elsewhere"))
	}
	if e.kp.ClientConnection.Kubeconfig != "" && e.own.manifests != "" {
		out = append(out, e.finding(source.Problem, "clientConnection.kubeconfig", "--manifests is given too",
			"objects come from the manifests alone"))
	}
	return out
}

func (e *Effective) finding(severity source.Severity, field, detail, effect string) source.Finding {
	f := source.Finding{Severity: severity, Field: e.origin(field), Detail: detail, Effect: effect}
	if where, name, ok := strings.Cut(f.Field, ": "); ok {
		f.Where, f.Field = where, name
	}
	return f
}

// saidFields returns the fields that the file or a flag sets, in order.
func (e *Effective) saidFields() []string {
	said := slices.Collect(maps.Keys(e.given))
	if e.doc != nil {
		said = slices.AppendSeq(said, maps.Keys(e.doc.lines))
	}
	said = slices.DeleteFunc(said, func(field string) bool { return strings.HasPrefix(field, "--") })
	slices.Sort(said)
	return slices.Compact(said)
}

// override is the value of one field in the file and by a flag.
type override struct{ file, flag string }

// overridden returns the two values of a field, if a flag overrides the file.
func (e *Effective) overridden(field string) (override, bool) {
	if e.given[field] == "" || e.doc == nil || e.doc.lines[field] == 0 {
		return override{}, false
	}
	file, _ := lookup(&e.file, field)
	now, _ := lookup(&e.kp, field)
	if empty(file) || reflect.DeepEqual(file.Interface(), now.Interface()) {
		return override{}, false
	}
	return override{written(file), written(now)}, true
}

// gap returns why a value has no effect, and what happens instead; nothing for a value that has one, that is the default or that
// is empty.
func (e *Effective) gap(field string) (detail, effect string) {
	now, _ := lookup(&e.kp, field)
	if e.given[field] == "" {
		if said, _ := lookup(&e.file, field); empty(said) {
			return "", ""
		}
	}
	if empty(now) {
		return "", ""
	}
	var usual values
	usual.defaults()
	if was, _ := lookup(&usual.kp, field); reflect.DeepEqual(was.Interface(), now.Interface()) {
		return "", ""
	}
	for group, why := range noMeaning {
		if field == group || strings.HasPrefix(field, group+".") {
			if group == string(e.kp.Mode) || group == "iptables" && e.kp.Mode != modeNFTables {
				return "", ""
			}
			return "no effect: " + why, "it is ignored"
		}
	}
	return "", ""
}

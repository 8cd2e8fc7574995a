// Command rules reads the chart's objects for the Prometheus Operator on standard input, which must be of its types field by field,
// and tests the alerts of the PrometheusRule with Prometheus's own query engine. The tests are files of promtool's format for
// "promtool test rules", of which this knows the parts that are about alerts; promtool itself takes several minutes to build.
// rule_files counts for promtool alone.
package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
	yamlv3 "go.yaml.in/yaml/v3"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

func main() {
	if err := run(os.Stdin, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(in io.Reader, files []string) error {
	alerts, err := read(in)
	if err != nil {
		return err
	}
	var errs []error
	fired, silent := map[string]bool{}, map[string]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var tests testFile
		decoder := yamlv3.NewDecoder(bytes.NewReader(text))
		decoder.KnownFields(true)
		if err := decoder.Decode(&tests); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		for _, group := range tests.Tests {
			for _, c := range group.Cases {
				if err := group.check(time.Duration(tests.EvaluationInterval), alerts, c); err != nil {
					errs = append(errs, fmt.Errorf("%s: %s, at %s: %w", file, group.Name, c.EvalTime, err))
				}
				fired[c.Alertname] = fired[c.Alertname] || len(c.ExpAlerts) > 0
				silent[c.Alertname] = silent[c.Alertname] || len(c.ExpAlerts) == 0
			}
		}
	}
	for name := range alerts {
		if !fired[name] || !silent[name] {
			errs = append(errs, fmt.Errorf("no test of %s firing, or none of it being silent", name))
		}
	}
	if len(errs) == 0 {
		fmt.Printf("%d alerts\n", len(alerts))
	}
	return errors.Join(errs...)
}

// read returns the alerts by name.
func read(in io.Reader) (map[string]rulefmt.Rule, error) {
	out := map[string]rulefmt.Rule{}
	kinds := map[string]int{}
	for docs := utilyaml.NewYAMLReader(bufio.NewReader(in)); ; {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		var kind struct{ Kind string }
		if err := yaml.Unmarshal(doc, &kind); err != nil {
			return nil, err
		}
		into := map[string]any{
			"PodMonitor": &monitoring.PodMonitor{}, "ServiceMonitor": &monitoring.ServiceMonitor{},
			"PrometheusRule": &monitoring.PrometheusRule{},
		}[kind.Kind]
		if into == nil {
			continue
		}
		kinds[kind.Kind]++
		if err := yaml.UnmarshalStrict(doc, into); err != nil {
			return nil, fmt.Errorf("%s: %w", kind.Kind, err)
		}
		rule, ok := into.(*monitoring.PrometheusRule)
		if !ok {
			continue
		}
		text, err := yaml.Marshal(rule.Spec)
		if err != nil {
			return nil, err
		}
		groups, errs := rulefmt.Parse(text, false, model.UTF8Validation, parser.NewParser(parser.Options{}), slog.New(slog.DiscardHandler))
		if len(errs) > 0 {
			return nil, errors.Join(errs...)
		}
		for _, g := range groups.Groups {
			for _, r := range g.Rules {
				out[r.Alert] = r
			}
		}
	}
	if len(kinds) != 3 || len(out) == 0 {
		return nil, fmt.Errorf("%d alerts, and objects %v; want one of each kind", len(out), kinds)
	}
	return out, nil
}

type testFile struct {
	RuleFiles          []string       `yaml:"rule_files"`
	EvaluationInterval model.Duration `yaml:"evaluation_interval"`
	Tests              []testGroup    `yaml:"tests"`
}

type testGroup struct {
	Name     string         `yaml:"name"`
	Interval model.Duration `yaml:"interval"`
	Series   []struct {
		Series string `yaml:"series"`
		Values string `yaml:"values"`
	} `yaml:"input_series"`
	Cases []testCase `yaml:"alert_rule_test"`
}

type testCase struct {
	EvalTime  model.Duration `yaml:"eval_time"`
	Alertname string         `yaml:"alertname"`
	ExpAlerts []alert        `yaml:"exp_alerts"`
}

type alert struct {
	Labels      map[string]string `yaml:"exp_labels"`
	Annotations map[string]string `yaml:"exp_annotations"`
}

func (a alert) String() string { return fmt.Sprint(a.Labels, " ", a.Annotations) }

// check evaluates an alert from the beginning up to a time, and compares what fires then.
func (g *testGroup) check(every time.Duration, alerts map[string]rulefmt.Rule, c testCase) error {
	rule, ok := alerts[c.Alertname]
	if !ok {
		return fmt.Errorf("there is no alert %s", c.Alertname)
	}
	load := "load " + g.Interval.String() + "\n"
	for _, s := range g.Series {
		load += "  " + s.Series + " " + s.Values + "\n"
	}
	loader, err := promqltest.NewLazyLoader(load, promqltest.LazyLoaderOpts{EnableAtModifier: true, EnableNegativeOffset: true})
	if err != nil {
		return err
	}
	defer loader.Close()
	end := time.Unix(0, 0).UTC().Add(time.Duration(c.EvalTime))
	loader.WithSamplesTill(end, func(e error) { err = e })
	if err != nil {
		return err
	}
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(rule.Expr)
	if err != nil {
		return err
	}
	alerting := rules.NewAlertingRule(rule.Alert, expr, time.Duration(rule.For), time.Duration(rule.KeepFiringFor), labels.FromMap(rule.Labels),
		labels.FromMap(rule.Annotations), labels.EmptyLabels(), "", true, slog.New(slog.DiscardHandler))
	query := rules.EngineQueryFunc(loader.QueryEngine(), loader.Queryable())
	for at := time.Unix(0, 0).UTC(); !at.After(end); at = at.Add(every) {
		if _, err := alerting.Eval(context.Background(), 0, at, query, &url.URL{}, 0); err != nil {
			return err
		}
	}
	var firing []alert
	for _, a := range alerting.ActiveAlerts() {
		if a.State == rules.StateFiring {
			own := a.Labels.Map()
			delete(own, model.AlertNameLabel)
			firing = append(firing, alert{own, a.Annotations.Map()})
		}
	}
	byText := func(a, b alert) int { return strings.Compare(a.String(), b.String()) }
	slices.SortFunc(firing, byText)
	want := slices.Clone(c.ExpAlerts)
	slices.SortFunc(want, byText)
	equal := func(a, b alert) bool {
		return maps.Equal(a.Labels, b.Labels) && maps.Equal(a.Annotations, b.Annotations)
	}
	if !slices.EqualFunc(firing, want, equal) {
		return fmt.Errorf("%s fires as\n\t%v, want\n\t%v", c.Alertname, firing, want)
	}
	return nil
}

package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	authorization "k8s.io/api/authorization/v1"
	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbac "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"nodeproxy/e2e/harness"
)

// TestRights: the roles of deploy/base/rbac.yaml allows what is needed (or no other test here would pass) and nothing
// else, and the daemon tells of its start by an event on its Node.
func TestRights(t *testing.T) {
	t.Parallel()
	l := newLab(t, harness.NFT)
	client, err := kubernetes.NewForConfig(l.cp.Via(l.Node1().Netns, &rest.Config{BearerToken: l.token}))
	require.NoError(t, err)
	l.run(t, "rights-are-the-documented-ones", func(s *scenario) {
		everywhere := []string{
			"/nodes: get list watch", "/services: list watch",
			"discovery.k8s.io/endpointslices: list watch", "events.k8s.io/events: create patch",
			"networking.k8s.io/servicecidrs: list watch",
		}
		for namespace, own := range map[string][]string{"default": nil, "kube-system": {"apps/daemonsets kube-proxy: get"}} {
			want := slices.Sorted(slices.Values(slices.Concat(everywhere, own)))
			s.eventually("the API server knows the rights", func() error {
				review, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(s.Context(),
					&authorization.SelfSubjectRulesReview{Spec: authorization.SelfSubjectRulesReviewSpec{Namespace: namespace}},
					metav1.CreateOptions{})
				if err != nil {
					return err
				}
				var got []string
				for _, rule := range review.Status.ResourceRules {
					for _, resource := range rule.Resources {
						if !strings.HasPrefix(resource, "selfsubject") { // everybody may ask what he may do
							slices.Sort(rule.Verbs)
							what := strings.Join(append([]string{rule.APIGroups[0] + "/" + resource}, rule.ResourceNames...), " ")
							got = append(got, what+": "+strings.Join(rule.Verbs, " "))
						}
					}
				}
				if slices.Sort(got); !slices.Equal(got, want) {
					return fmt.Errorf("rights in namespace %s: %q, want %q", namespace, got, want)
				}
				return nil
			})
		}
	})
	l.run(t, "other-requests-are-denied", func(s *scenario) {
		core := client.CoreV1()
		for what, request := range map[string]func() error{
			"list secrets": func() error { _, err := core.Secrets("").List(s.Context(), metav1.ListOptions{}); return err },
			"list daemon sets": func() error {
				_, err := client.AppsV1().DaemonSets("kube-system").List(s.Context(), metav1.ListOptions{})
				return err
			},
			"list pods": func() error { _, err := core.Pods("").List(s.Context(), metav1.ListOptions{}); return err },
			"get a service": func() error {
				_, err := core.Services("default").Get(s.Context(), "kubernetes", metav1.GetOptions{})
				return err
			},
			"create a service": func() error {
				_, err := core.Services("default").Create(s.Context(),
					&v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "mine"}, Spec: v1.ServiceSpec{Ports: []v1.ServicePort{{Port: 80}}}},
					metav1.CreateOptions{})
				return err
			},
			"delete its node": func() error { return core.Nodes().Delete(s.Context(), "node1", metav1.DeleteOptions{}) },
			"get a config map": func() error {
				_, err := core.ConfigMaps("kube-system").Get(s.Context(), "extension-apiserver-authentication", metav1.GetOptions{})
				return err
			},
			"delete events": func() error {
				return client.EventsV1().Events("default").DeleteCollection(s.Context(), metav1.DeleteOptions{}, metav1.ListOptions{})
			},
		} {
			if err := request(); !apierrors.IsForbidden(err) {
				s.Errorf("%s: %v, want it to be forbidden", what, err)
			}
		}
	})
	l.run(t, "event-of-the-start", func(s *scenario) {
		s.eventually("event", func() error {
			events, err := l.cp.Admin.EventsV1().Events("default").List(s.Context(), metav1.ListOptions{})
			s.must(err)
			for _, e := range events.Items {
				if e.Reason == "Starting" && e.Regarding.Kind == "Node" && e.Regarding.Name == "node1" {
					return nil
				}
			}
			return errors.New("no event Starting on the Node")
		})
	})
	l.run(t, "service-cidrs", func(s *scenario) { serviceCIDRs(s, client) })
}

// serviceCIDRs: a further ServiceCIDR makes everything anew, as the iptables backend's log tells; and without the right to
// read them, which roles of other makers do not give, Services are proxied all the same, and the log names the rule.
func serviceCIDRs(s *scenario, client kubernetes.Interface) {
	networking := s.cp.Admin.NetworkingV1().ServiceCIDRs()
	line := len(s.daemon.Log())
	_, err := networking.Create(s.Context(), &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "further"},
		Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.97.0.0/16"}}}, metav1.CreateOptions{})
	s.must(err)
	s.must(s.daemon.WaitForAfter(line, harness.Limit, harness.InSync, "changed=all"))

	s.must(s.daemon.Stop())
	roles := s.cp.Admin.RbacV1().ClusterRoles()
	role, err := roles.Get(s.Context(), "nodeproxy", metav1.GetOptions{})
	s.must(err)
	role.Rules = slices.DeleteFunc(role.Rules, func(r rbac.PolicyRule) bool { return slices.Contains(r.Resources, "servicecidrs") })
	_, err = roles.Update(s.Context(), role, metav1.UpdateOptions{})
	s.must(err)
	s.eventually("right is gone", func() error {
		_, err := client.NetworkingV1().ServiceCIDRs().List(s.Context(), metav1.ListOptions{})
		if !apierrors.IsForbidden(err) {
			return fmt.Errorf("list ServiceCIDRs: %v, want it to be forbidden", err)
		}
		return nil
	})
	s.startDaemon(s.T) // waits until it is in sync
	s.must(s.daemon.WaitFor(harness.Limit, "level=WARN", "resources [servicecidrs]"))
	s.pod("n1a")
	svc := s.service(func(svc *v1.Service) { svc.Spec.ClusterIP = "10.96.77.77" }) // The client has no route to the further range.
	s.eventually("service", servers(s.Client, at(svc, 4), "n1a"))
}

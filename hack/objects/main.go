// Command objects writes the objects of a small cluster as the API server of one version of Kubernetes serialises them, in JSON and in
// protobuf: whatever field its types have is set, and none that they lack. hack/kubernetes-objects compiles it with the types of
// each version.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1beta1" // v1 has the same fields, and is not in all versions
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func main() {
	minor := flag.Int("minor", 0, "minor version of Kubernetes")
	dir := flag.String("output", "", "directory to write to")
	flag.Parse()
	if err := run(*minor, *dir); err != nil {
		fmt.Fprintf(os.Stderr, "objects: %v\n", err)
		os.Exit(1)
	}
}

func run(minor int, dir string) error {
	services := &v1.ServiceList{}
	for _, text := range strings.Split(strings.ReplaceAll(serviceTexts, "CLOSE", prefer(minor)), "---") {
		s := v1.Service{}
		fill(reflect.ValueOf(&s).Elem())
		s.Spec, s.Status.LoadBalancer = v1.ServiceSpec{}, v1.LoadBalancerStatus{}
		if err := over(text, &s, &s.ObjectMeta); err != nil {
			return err
		}
		services.Items = append(services.Items, s)
	}
	slices := &discovery.EndpointSliceList{}
	for _, text := range strings.Split(sliceTexts, "---") {
		s := discovery.EndpointSlice{}
		fill(reflect.ValueOf(&s).Elem())
		s.Ports, s.Endpoints = nil, nil
		if err := over(text, &s, &s.ObjectMeta); err != nil {
			return err
		}
		slices.Items = append(slices.Items, s)
	}
	node := v1.Node{}
	fill(reflect.ValueOf(&node).Elem())
	node.Spec.PodCIDRs, node.Status.Addresses = nil, nil
	if err := over(nodeText, &node, &node.ObjectMeta); err != nil {
		return err
	}
	if err := write(dir, "services", "", "ServiceList", services); err != nil {
		return err
	}
	if err := write(dir, "endpointslices", "discovery.k8s.io", "EndpointSliceList", slices); err != nil {
		return err
	}
	if err := write(dir, "nodes", "", "NodeList", &v1.NodeList{Items: []v1.Node{node}}); err != nil {
		return err
	}
	if minor < 33 {
		return nil // API servers have ServiceCIDR v1beta1 only, and off
	}
	cidr := networking.ServiceCIDR{}
	fill(reflect.ValueOf(&cidr).Elem())
	cidr.Spec.CIDRs = nil
	if err := over(cidrText, &cidr, &cidr.ObjectMeta); err != nil {
		return err
	}
	return write(dir, "servicecidrs", "networking.k8s.io", "ServiceCIDRList", &networking.ServiceCIDRList{Items: []networking.ServiceCIDR{cidr}})
}

// prefer is the trafficDistribution that goes furthest of those that a version takes.
func prefer(minor int) string {
	if minor < 33 {
		return "PreferClose"
	}
	return "PreferSameNode"
}

// over sets what a text says of an object.
func over(text string, object any, meta *metav1.ObjectMeta) error {
	meta.DeletionTimestamp, meta.DeletionGracePeriodSeconds, meta.Labels, meta.Annotations = nil, nil, nil, nil
	if err := json.Unmarshal([]byte(text), object); err != nil {
		return fmt.Errorf("%w in %s", err, text)
	}
	return nil
}

type list interface {
	runtime.Object
	SetResourceVersion(string)
}

func write(dir, name, group, kind string, l list) error {
	l.SetResourceVersion("10")
	l.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{Group: group, Version: "v1", Kind: kind})
	text, err := json.MarshalIndent(l, "", " ")
	if err != nil {
		return err
	}
	var binary bytes.Buffer
	scheme := runtime.NewScheme()
	if err := protobuf.NewSerializer(scheme, scheme).Encode(l, &binary); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, name+".json"), append(text, '\n'), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name+".pb"), binary.Bytes(), 0o644)
}

// fill sets every field there is.
func fill(v reflect.Value) {
	switch x := v.Addr().Interface().(type) {
	case *metav1.TypeMeta: // elements of lists have none
		return
	case *metav1.Time:
		*x = metav1.Unix(1_700_000_000, 0)
		return
	case *metav1.MicroTime:
		*x = metav1.NewMicroTime(time.Unix(1_700_000_000, 0))
		return
	case *resource.Quantity:
		*x = resource.MustParse("1")
		return
	case *intstr.IntOrString:
		*x = intstr.FromInt32(8080)
		return
	case *metav1.FieldsV1:
		if err := x.UnmarshalJSON([]byte("{}")); err != nil {
			panic(err)
		}
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint8:
		v.SetUint('x')
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key)
		fill(value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	default:
		panic(fmt.Sprintf("a field of type %s", v.Type()))
	}
}
